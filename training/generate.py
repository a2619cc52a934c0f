"""The target writes its own training text, or reads what is given: many requests at once through the decoding loop, hidden
states caught on the way.

A row of the target does not depend on what shares its pass, so a task gives the same tokens and states in any run. The order
of tasks is fixed, and shard n holds the same tasks however often a run was interrupted. Tokens of unfinished shards are kept
in a small file: a later run computes their states again, as prompts, and goes on behind them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from services.verifier.engine.loop import DecodingLoop
from speculation.errors import ConfigurationError
from speculation.files import write_whole
from speculation.messages import GenerationRequest, Progress
from speculation.types import Plan, SamplingParams
from training.data_manifest import DataManifest, write_manifest
from training.observed_target import ObservedTarget
from training.shards import TrainingSequence, shard_name, write_shard
from training.tasks import DataTask

UNDER_WAY = "under-way.json"
# Seconds between two writings of the tokens of unfinished shards.
_SAVE_EVERY_S = 30.0


@dataclass(kw_only=True, slots=True)
class DataProgress:
    """How far a stage of a run is.

    Attributes:
        total: tasks, or prompts to be made.
        done: finished ones, those of earlier runs included; ``before`` counts only these.
        tokens: made in this run.
        started: by ``time.monotonic``.
    """

    stage: str
    total: int
    done: int = 0
    before: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return max(1e-9, time.monotonic() - self.started)

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; None before anything is done."""
        done = self.done - self.before
        return self.seconds * (self.total - self.done) / done if done else None


class DataRun:
    """Makes the tasks' sequences and writes them into shards.

    Args:
        out: the folder, with ``manifest`` in it already.
        manifest: its shards are not made again.
        tasks: in the order of all runs into this folder.
    """

    def __init__(self, out: Path, manifest: DataManifest, tasks: Sequence[DataTask], target: ObservedTarget) -> None:
        self._out = out
        self._manifest = manifest
        self._target = target
        size = manifest.sampling.shard_sequences
        whole = {entry.file: entry.sequences for entry in manifest.shards}
        cut = [list(tasks[begin : begin + size]) for begin in range(0, len(tasks), size)]
        # The last shard of a shorter run is made again with more sequences.
        self._shards = {number: part for number, part in enumerate(cut) if whole.get(shard_name(number), 0) < len(part)}
        self._queue = iter([(number, task) for number, part in self._shards.items() for task in part])
        self._made: dict[int, dict[str, TrainingSequence]] = {}
        self._said = self._read_under_way()
        self._writing = asyncio.Lock()
        done = len(tasks) - sum(map(len, self._shards.values()))
        self.progress = DataProgress(stage="sequences", total=len(tasks), done=done, before=done)

    async def work(self, loop: DecodingLoop, concurrency: int) -> None:
        """Make everything that is missing. If it is cancelled, the next run goes on where it stopped.

        Raises:
            ConfigurationError: a shard cannot be written, as on a full disk; what was written stays valid.
            OutriderError: the target failed.
        """
        saving = asyncio.create_task(self._save_often())
        try:
            async with asyncio.TaskGroup() as makers:
                for _ in range(concurrency):
                    makers.create_task(self._make_all(loop))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            saving.cancel()
            self._save()

    async def _make_all(self, loop: DecodingLoop) -> None:
        for number, task in self._queue:
            sequence = await self._make(loop, task)
            made = self._made.setdefault(number, {})
            made[task.id] = sequence
            self.progress.done += 1
            if len(made) == len(self._shards[number]):
                await self._write(number)

    async def _make(self, loop: DecodingLoop, task: DataTask) -> TrainingSequence:
        if task.prompt.answer:
            return await self._read(loop, task)
        sampling = self._manifest.sampling
        said = self._said.setdefault(task.id, [])
        # The last token is chosen again, so that even a complete answer passes through the target.
        del said[-1:]
        request = GenerationRequest(
            request_id=task.id,
            prompt=task.prompt.tokens,
            committed=tuple(said),
            sampling=SamplingParams(
                temperature=task.temperature,
                seed=task.seed(sampling.seed),
                max_tokens=sampling.max_new_tokens,
                ignore_generation_config=True,
            ),
            plan=Plan(strategy="autoregressive", observe_layers=self._manifest.layers, observe_prompt=True),
        )
        async for event in loop.generate(request):
            if isinstance(event, Progress):
                said.extend(event.token_ids)
                self.progress.tokens += len(event.token_ids)
        return self._sequence(task, said)

    async def _read(self, loop: DecodingLoop, task: DataTask) -> TrainingSequence:
        """A given answer: the target computes its states as those of a prompt, and what it says itself is dropped."""
        answer = task.prompt.answer
        request = GenerationRequest(
            request_id=task.id,
            # No state of the last token is kept, as of the target's own answers.
            prompt=(*task.prompt.tokens, *answer[:-1]),
            sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_generation_config=True),
            plan=Plan(strategy="autoregressive", observe_layers=self._manifest.layers, observe_prompt=True),
        )
        async for _ in loop.generate(request):
            pass
        return self._sequence(task, answer)

    def _sequence(self, task: DataTask, said: Sequence[int]) -> TrainingSequence:
        tokens = np.array([*task.prompt.tokens, *said], dtype=np.int32)
        states, known = self._target.take(task.id, len(tokens), self._manifest.width)
        return TrainingSequence(
            tokens=tokens,
            prompt_length=len(task.prompt.tokens),
            states=states,
            known=known,
            domain=task.prompt.domain,
            temperature=task.temperature,
        )

    async def _write(self, number: int) -> None:
        tasks, made = self._shards[number], self._made.pop(number)
        sequences = [made[task.id] for task in tasks]
        held_out = [task.prompt.held_out for task in tasks]
        domains = self._manifest.domains
        async with self._writing:
            try:
                entry = await asyncio.to_thread(write_shard, self._out, number, sequences, domains, held_out)
                others = [each for each in self._manifest.shards if each.file != entry.file]
                shards = tuple(sorted([*others, entry], key=lambda each: each.file))
                manifest = self._manifest.model_copy(update={"shards": shards})
                write_manifest(self._out, manifest)
            except OSError as error:
                raise ConfigurationError(
                    (
                        f"shard {number} cannot be written ({error.strerror}); the {len(self._manifest.shards)} shards "
                        "written before stay valid: make room and run the same command again"
                    ),
                    field=self._out,
                ) from error
            self._manifest = manifest
            for task in tasks:
                self._said.pop(task.id, None)

    # --- tokens of unfinished shards ----------------------------------------------------------------------------

    def _read_under_way(self) -> dict[str, list[int]]:
        """Tokens by task; a damaged file only costs the time to choose them again."""
        wanted = {task.id for part in self._shards.values() for task in part}
        try:
            kept = json.loads((self._out / UNDER_WAY).read_bytes())
            return {name: [int(token) for token in said] for name, said in kept.items() if name in wanted}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def _save(self) -> None:
        # A full disk is reported where shards are written.
        with suppress(OSError):
            write_whole(self._out / UNDER_WAY, json.dumps(self._said).encode())

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            self._save()
