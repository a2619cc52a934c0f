"""What earlier answers are worth to agents, who ask much the same again and again.

    python -m lab.agent_sessions [--model NAME] [--tokens 96] [--sessions 3] [--write sessions.json]

Three kinds of sessions, each of some turns: an edit loop (a program is changed again and again, with the answer before in
the prompt), a tool loop (each of a tool's results is summed up in the same form), and retries (one prompt, sampled with
other seeds). They are asked one at a time, by `suffix` and by `blend`, in four arrangements:

- `nothing`: no answer is kept.
- `memory`: a drafter keeps them (`drafter.suffix_cached_tokens`), and is as old as the session.
- `store, new drafter`: they are kept in Redis as well (`retrieval.answers_tokens`). Every turn meets a drafter that has just
  started, as after a restart or at another replica.
- `store, second day`: all sessions again, with what the first ones left in Redis.

Tokens per pass do not depend on what else the machine does; seconds do. Ends with code 1 if answers differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import redis
from rich.table import Table

from benchmarks.bench.environment import describe
from cluster.build import in_process
from cluster.models.target import ResolvedModel, resolve
from cluster.process.terminal import stdout
from cluster.settings.config import load
from retrieval_index.embedded import embedded_redis
from services.api.messages import ChatMessage, ClientRequest, RequestedSampling, RouterPort, TextChunk

STRATEGIES = ("suffix", "blend")
TENANT = "agents"
_PROGRAMS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n"
    "    def pop(self):\n        return self.items.pop()\n",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n\n"
    "def spread(values):\n    return max(values) - min(values)\n",
    "def read_table(path):\n    rows = []\n    with open(path) as file:\n        for line in file:\n"
    "            rows.append(line.strip().split(','))\n    return rows\n",
)
_EDITS = ("Rename every variable so that it is one word.", "Add a docstring to every function.", "Add type hints.")
_TOOLS = (
    ("get_weather", ("Berlin: 7 C, rain", "Madrid: 18 C, sun", "Oslo: -3 C, snow")),
    ("read_file", ("a.txt: 120 lines, no errors", "b.txt: 88 lines, 2 errors", "c.txt: 310 lines, no errors")),
    ("search", ("red shoes: 14 hits", "blue shoes: 3 hits", "green shoes: 0 hits")),
)
_ASKED = ("Name three uses of a paper clip.", "Write a haiku about rain.", "Explain what a hash table is in two sentences.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A prompt; ``{}`` in it stands for the answer before."""

    text: str
    seed: int = 0
    temperature: float = 0.0


@dataclass(kw_only=True, slots=True)
class Counted:
    """What the answers of one kind took in one arrangement."""

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0

    @property
    def per_pass(self) -> float:
        """Tokens per pass."""
        return self.tokens / max(1, self.passes)


# Of each kind of sessions: the turns of each session.
Sessions = dict[str, list[list[Turn]]]


def sessions(number: int) -> Sessions:
    """So many sessions of each kind."""
    return {
        "edit loop": [
            [
                Turn(text=f"{'{}' if step else program}\n\n{edit} Print the whole program.")
                for step, edit in enumerate(_EDITS)
            ]
            for program in _PROGRAMS[:number]
        ],
        "tool loop": [
            [Turn(text=f"The tool {tool} says: {said}. Answer with: Tool, Result, Next step.") for said in results]
            for tool, results in _TOOLS[:number]
        ],
        "retries": [[Turn(text=text, seed=seed, temperature=0.7) for seed in range(3)] for text in _ASKED[:number]],
    }


class Arrangement:
    """A service that keeps answers in one way.

    Args:
        new_each_turn: whether every turn meets a service that has just started.
    """

    def __init__(self, model: ResolvedModel, flags: Sequence[str], tokens: int, *, new_each_turn: bool = False) -> None:
        self._model, self._flags, self._tokens, self._new = model, flags, tokens, new_each_turn

    async def run(self, strategy: str, turns: Sequence[Turn], counted: Counted) -> list[str]:
        """Ask one session's turns; gives the answers."""
        answers: list[str] = []
        for some in [[turn] for turn in turns] if self._new else [turns]:
            async with in_process(load(flags=self._flags), self._model) as pipeline:
                for turn in some:
                    text = turn.text.replace("{}", answers[-1]) if answers else turn.text
                    answers.append(await self._answer(pipeline.router, strategy, replace(turn, text=text), counted))
        return answers

    async def _answer(self, router: RouterPort, strategy: str, turn: Turn, counted: Counted) -> str:
        request = ClientRequest(
            input=(ChatMessage(role="user", content=turn.text),),
            sampling=RequestedSampling(temperature=turn.temperature, seed=turn.seed, max_tokens=self._tokens),
            strategy=strategy,
            tenant=TENANT,
        )
        began, answer = time.perf_counter(), ""
        async for event in router.generate(request):
            if isinstance(event, TextChunk):
                answer += event.text
            else:
                counted.tokens += event.completion_tokens
                counted.passes += event.stats.num_spec_steps
        counted.seconds += time.perf_counter() - began
        return answer


def arrangements(model: ResolvedModel, url: str, tokens: int) -> dict[str, Arrangement]:
    """All four, by name."""
    quiet = [f"model={model.name}", "metrics.export=none"]
    memory = [*quiet, "drafter.suffix_cached_tokens=200000"]
    store = [*memory, f"retrieval.redis_url={url}", "retrieval.answers_tokens=200000"]
    return {
        "nothing": Arrangement(model, quiet, tokens),
        "memory": Arrangement(model, memory, tokens),
        "store, new drafter": Arrangement(model, store, tokens, new_each_turn=True),
        "store, second day": Arrangement(model, store, tokens, new_each_turn=True),
    }


# By strategy, kind of session and arrangement.
Found = dict[tuple[str, str, str], Counted]


async def measured(model: ResolvedModel, number: int, tokens: int) -> tuple[Found, bool, float]:
    """What was counted; whether all answers were equal; bytes of Redis for a kept token."""
    found: Found = {}
    equal, per_token = True, 0.0
    for strategy in STRATEGIES:
        with embedded_redis() as url:
            answers: dict[str, list[list[str]]] = {}
            for name, arrangement in arrangements(model, url, tokens).items():
                for kind, several in sessions(number).items():
                    counted = found[strategy, kind, name] = Counted()
                    answers.setdefault(kind, []).append(
                        [answer for turns in several for answer in await arrangement.run(strategy, turns, counted)]
                    )
                    print(f"{strategy}, {name}, {kind}: {counted.per_pass:.2f} tokens per pass", flush=True)
            equal = equal and all(one == several[0] for several in answers.values() for one in several)
            per_token = _bytes_per_token(url)
    return found, equal, per_token


def _bytes_per_token(url: str) -> float:
    """What Redis takes for the kept answers, its own bookkeeping included."""
    with closing(redis.Redis.from_url(url)) as client:
        keys = list(client.scan_iter("outrider:*:answers:*"))
        used = sum(cast(int, client.memory_usage(key)) for key in keys)
        kept = sum(int(fields[b"size"]) for key in keys for _, fields in cast(Any, client.xrange(key)))
    return used / max(1, kept)


def table(found: Found) -> Table:
    """Tokens per pass, and seconds beside those of the first arrangement."""
    names = list(dict.fromkeys(name for _, _, name in found))
    made = Table("strategy", "sessions", *names, title="tokens per pass (seconds / those with nothing kept)")
    for strategy, kind in dict.fromkeys((strategy, kind) for strategy, kind, _ in found):
        row = [found[strategy, kind, name] for name in names]
        made.add_row(strategy, kind, *(f"{each.per_pass:.2f} ({each.seconds / row[0].seconds:.2f})" for each in row))
    return made


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    model = resolve(asked.model, load().cache_dir)
    found, equal, per_token = asyncio.run(measured(model, asked.sessions, asked.tokens))
    stdout().print(table(found))
    print(f"Redis takes {per_token:.1f} bytes a kept token.")
    print("All arrangements gave the same answers." if equal else "NOT EQUAL: arrangements gave different answers.")
    if asked.write is not None:
        rows = {" / ".join(key): asdict(counted) for key, counted in found.items()}
        asked.write.write_text(
            json.dumps({"environment": describe(1), "bytes_per_token": per_token, "rows": rows}, indent=1)
        )
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
