"""Answers held to JSON schemas: a strategy against plain decoding, token for token and in time.

    python -m lab.structured [--schemas 500] [--strategy blend] [--tokens 200] [--minutes 6] [--write rows.jsonl]

Each schema is asked for under both, in turns, in one run and on one server. Every answer is compared, and every complete one
is checked against its schema by another implementation. Ends with code 1 if one differs, or is not valid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jsonschema
from rich.progress import track
from rich.table import Table

from cluster.build import in_process
from cluster.models.target import resolve
from cluster.process.terminal import stderr, stdout
from cluster.settings.config import load
from lab.schema_maker import Schema, make_schema
from services.api.messages import ChatMessage, ClientRequest, Completion, RequestedSampling, RouterPort, TextChunk
from speculation.errors import Internal
from speculation.types import FinishReason, StructuredOutputs

PLAIN = "autoregressive"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One answer.

    Attributes:
        seconds: from the request to the end.
        passes: of the target that gave tokens.
        by_grammar: accepted tokens that were drafted because the grammar demanded them.
        valid: it has the form; None: it was cut.
    """

    tokens: tuple[int, ...]
    text: str
    seconds: float
    passes: int
    by_grammar: int
    valid: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One schema's answers under both strategies."""

    number: int
    plain: Held
    drafted: Held

    @property
    def equal(self) -> bool:
        """Whether both have the same tokens."""
        return self.plain.tokens == self.drafted.tokens

    @property
    def right(self) -> bool:
        """Whether they are equal, and have the form if they are complete."""
        return self.equal and self.drafted.valid is not False

    @property
    def ratio(self) -> float:
        """How many times as long plain decoding took."""
        return self.plain.seconds / self.drafted.seconds


def is_valid(text: str, schema: Schema) -> bool:
    """Whether a text is JSON that satisfies a schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def ask(router: RouterPort, schema: Schema, strategy: str, tokens: int, temperature: float) -> Held:
    """One answer to a schema."""
    text = json.dumps(schema)
    request = ClientRequest(
        input=(ChatMessage(role="user", content=f"Write one example in JSON that matches this JSON schema:\n{text}"),),
        sampling=RequestedSampling(
            temperature=temperature,
            seed=1,
            max_tokens=tokens,
            ignore_generation_config=True,
            structured_outputs=StructuredOutputs(kind="json", text=text),
        ),
        strategy=strategy,
        tenant="",
    )
    began, answer, found = time.perf_counter(), "", list[int]()
    async for event in router.generate(request):
        if isinstance(event, TextChunk):
            answer += event.text
            found += event.token_ids
        if isinstance(event, Completion):
            ended = event.finish_reason is FinishReason.STOP
            return Held(
                tokens=tuple(found),
                text=answer,
                seconds=time.perf_counter() - began,
                passes=event.stats.num_spec_steps,
                by_grammar=event.stats.accepted_by_source.get("grammar", 0),
                valid=is_valid(answer, schema) if ended else None,
            )
    raise Internal("an answer without an end")


async def run(arguments: argparse.Namespace) -> list[Pair]:
    """Ask for every schema under both strategies, the first one changing from schema to schema."""
    settings = load(flags=arguments.set or ())
    model = resolve(settings.model, settings.cache_dir)
    pairs: list[Pair] = []
    async with in_process(settings, model) as running:
        for strategy in (PLAIN, arguments.strategy):
            await ask(running.router, make_schema(-1), strategy, 24, 0.0)
        began = time.perf_counter()
        for number in track(range(arguments.schemas), "Asking", console=stderr()):
            if time.perf_counter() - began > 60 * arguments.minutes:
                break
            schema, held = make_schema(number), dict[str, Held]()
            order = (PLAIN, arguments.strategy) if number % 2 else (arguments.strategy, PLAIN)
            for strategy in order:
                held[strategy] = await ask(running.router, schema, strategy, arguments.tokens, arguments.temperature)
            pairs.append(Pair(number=number, plain=held[PLAIN], drafted=held[arguments.strategy]))
    return pairs


def show(pairs: list[Pair], strategy: str) -> None:
    """Print what came out, over all schemas."""
    table = Table(title=f"{len(pairs)} JSON schemas: {strategy} against plain decoding", title_justify="left")
    for column in ("", "tokens", "passes", "tokens per pass", "seconds", "complete", "valid of these", "by the grammar"):
        table.add_column(column, justify="left" if not column else "right")
    for name, side in ((PLAIN, [pair.plain for pair in pairs]), (strategy, [pair.drafted for pair in pairs])):
        tokens, passes = sum(len(one.tokens) for one in side), sum(one.passes for one in side)
        complete = [one for one in side if one.valid is not None]
        table.add_row(
            name,
            f"{tokens:,}",
            f"{passes:,}",
            f"{tokens / passes:.2f}",
            f"{sum(one.seconds for one in side):.1f}",
            str(len(complete)),
            str(sum(one.valid is True for one in complete)),
            f"{sum(one.by_grammar for one in side) / tokens:.0%}",
        )
    console = stdout()
    console.print(table)
    ratios = sorted(pair.ratio for pair in pairs)
    whole = sum(pair.plain.seconds for pair in pairs) / sum(pair.drafted.seconds for pair in pairs)
    console.print(
        f"equal answers: {sum(pair.equal for pair in pairs)} of {len(pairs)}; plain takes {whole:.2f} times as long "
        f"(per schema: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--strategy", default="blend")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no schema after so many")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="a setting of the server")
    parser.add_argument("--write", type=Path, help="file for a line of JSON per schema")
    arguments = parser.parse_args()
    pairs = asyncio.run(run(arguments))
    if arguments.write is not None:
        arguments.write.write_text("".join(json.dumps(asdict(pair)) + "\n" for pair in pairs))
    show(pairs, arguments.strategy)
    if wrong := [pair.number for pair in pairs if not pair.right]:
        raise SystemExit(f"not equal to plain decoding, or not valid: schemas {', '.join(map(str, wrong))}")


if __name__ == "__main__":
    main()
