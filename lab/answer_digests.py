"""One line for each strategy and temperature, with a digest of all answers: ``python -m lab.answer_digests > NEW``.

Two commits give the same answers if their lines are the same, so ``diff`` compares them. Drafts change no token: the lines
of one temperature differ in the strategy's name alone.

Starts ``outrider serve --in-process`` in the working directory and asks it through the SDK. Nothing else of Outrider is
used, so it can also ask an older commit, from a checkout of that::

    cd OLDER && PYTHONPATH=$PWD:$PWD/sdk python NEWER/lab/answer_digests.py > OLD
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from outrider import AsyncClient, Unavailable

# All are served with any model; the last two ask the trained drafters that come with the default model as well.
_STRATEGIES = "autoregressive,prompt_lookup,suffix,recycling,blend,auto"
_SUBJECTS = ("a lighthouse", "the moon", "bread", "a bicycle", "rivers", "chess", "bees", "glass", "a library", "snow")
_FORMS = (
    "Explain {0} to a child in three sentences.",
    "Write a short poem about {0}.",
    "List six facts about {0}, numbered.",
    "Write a Python function whose name and docstring have to do with {0}.",
    'Write the same sentence about {0} three times, then translate it into French: "Everybody knows {0}."',
    'Answer with JSON of the fields "name", "size" and "use" for each of four kinds of {0}.',
)
# Loading takes seconds; compiling the C code for the first time takes a minute.
_STARTS_S = 600.0


def built_in() -> list[str]:
    """Sixty prompts: ten subjects, each in six forms."""
    return [form.format(subject) for subject in _SUBJECTS for form in _FORMS]


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file, one a line.

    A line is plain text, a JSON string, or an object with ``turns`` (the first one), ``question``, ``prompt`` or ``text``.
    """
    return [_prompt_of(line) for line in file.read_text().splitlines() if line.strip()]


def _prompt_of(line: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return line
    if not isinstance(entry, dict):
        return str(entry)
    if "turns" in entry:
        return str(entry["turns"][0])
    return str(next(entry[key] for key in ("question", "prompt", "text") if key in entry))


def digest_of(answers: Sequence[Any]) -> str:
    """A digest of texts, tokens and ends of answers, in their order."""
    told = [[answer.text, list(answer.token_ids), answer.finish_reason] for answer in answers]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


@contextmanager
def _served(arguments: argparse.Namespace) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "cli.main", "serve", "--in-process", "--port", str(port)]
    command += ["--model", arguments.model] if arguments.model else []
    command += [part for setting in arguments.set for part in ("--set", setting)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


async def _until_it_serves(client: AsyncClient) -> None:
    async with asyncio.timeout(_STARTS_S):
        while True:
            try:
                await client.models()
                return
            except Unavailable:
                await asyncio.sleep(0.5)


async def _lines(address: str, prompts: Sequence[str], arguments: argparse.Namespace) -> None:
    room = asyncio.Semaphore(arguments.at_once)

    async def answered(client: AsyncClient, number: int, strategy: Any, temperature: float) -> Any:
        async with room:
            return await client.generate(
                messages=[{"role": "user", "content": prompts[number]}],
                strategy=strategy,
                temperature=temperature,
                # Under temperature 0 it says nothing.
                seed=number,
                max_tokens=arguments.max_tokens,
            )

    async with AsyncClient(address, timeout_s=600) as client:
        await _until_it_serves(client)
        for temperature, strategy in product(arguments.temperatures, arguments.strategies):
            answers = await asyncio.gather(*(answered(client, n, strategy, temperature) for n in range(len(prompts))))
            tokens = sum(len(answer.token_ids) for answer in answers)
            where = f"temperature={temperature:g} {strategy}"
            print(f"{where} answers={len(answers)} tokens={tokens} {digest_of(answers)}", flush=True)
            if arguments.each:
                for number, answer in enumerate(answers):
                    print(f"{where} prompt={number} {digest_of([answer])[:16]}", flush=True)


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Read the arguments, serve, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="a file of prompts; default: sixty built-in ones")
    parser.add_argument("--first", type=int, default=60, help="ask so many of the file's first prompts")
    parser.add_argument("--strategies", type=_names, default=_names(_STRATEGIES), help=f"default: {_STRATEGIES}")
    parser.add_argument("--temperatures", type=_numbers, default=[0.0, 1.0], help="default: 0,1")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=4, help="requests under way")
    parser.add_argument("--model", help="as of outrider serve")
    parser.add_argument("--set", action="append", default=[], help="a setting, as of outrider serve")
    parser.add_argument("--each", action="store_true", help="a line for each answer as well, to find which one differs")
    arguments = parser.parse_args()
    prompts = (read_prompts(arguments.prompts) if arguments.prompts else built_in())[: arguments.first]
    with _served(arguments) as address:
        asyncio.run(_lines(address, prompts, arguments))


if __name__ == "__main__":
    main()
