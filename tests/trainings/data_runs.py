"""Runs that make training data from a tiny target and a few prompts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from services.verifier.config import TargetConfig
from tests.tiny_models.tiny import make_tiny_model
from training.data_folder import DataOptions
from training.generate import UNDER_WAY, DataProgress
from training.interruption import Interruption
from training.make_data import make_data
from training.observed_target import ObservedTarget

OPTIONS = DataOptions(
    layers=(0, -1), max_new_tokens=24, samples=3, max_prompt_tokens=64, shard_sequences=5, concurrency=4, seed=7
)
LINES = {
    "math": [{"question": f"what is {n} + {n}?", "answer": "no"} for n in range(4)],
    "code": [{"text": f"sort {n} numbers", "code": "no"} for n in range(3)],
    "chat": [
        {"messages": [{"role": "user", "content": f"hello {n}"}, {"role": "assistant", "content": "hi"}]} for n in range(2)
    ],
}
TASKS = 3 * (4 + 3 + 2)


def make_model(folder: Path) -> Path:
    """Small weights: the texts of larger ones run in circles."""
    return make_tiny_model(folder, initializer_range=0.15)


def write_prompts(folder: Path) -> list[Path]:
    for name, lines in LINES.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return [folder / f"{name}.jsonl" for name in LINES]


def config_of(model: Path) -> TargetConfig:
    return TargetConfig(model_path=str(model), threads=1)


async def make(
    out: Path,
    model: Path,
    files: list[Path],
    options: DataOptions = OPTIONS,
    stop_at: int | None = None,
    said: Callable[[str], None] = lambda text: None,
    given: Sequence[Path] = (),
) -> DataProgress:
    """Make data, interrupted as soon as ``stop_at`` tokens have been made in a stage."""
    interruption = Interruption()

    @asynccontextmanager
    async def show(progress: DataProgress, target: ObservedTarget) -> AsyncIterator[None]:
        async def watch() -> None:
            while stop_at is None or progress.tokens < stop_at:
                await asyncio.sleep(0)
            interruption.stop()

        task = asyncio.create_task(watch())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    return await make_data(out, files, given, options, "tiny", config_of(model), interruption, show, said)


def digests(folder: Path) -> dict[str, str]:
    """Of everything but the tokens under way."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.name != UNDER_WAY}
