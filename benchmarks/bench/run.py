"""``outrider bench``: measures how fast each strategy and peer is, and whether a token changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.bench import differences, environment
from benchmarks.bench.contestants import PEERS, PLAIN
from benchmarks.bench.lineup import Lineup
from benchmarks.bench.measure import Measurements, Schedule, measure
from benchmarks.bench.prompts import make_requests
from benchmarks.bench.records import Cell, ContestantFailed, LoadPoint, Prompt, Request, TimedAnswer
from benchmarks.bench.results import FORMAT, cells_as_objects, cumulative_tokens
from benchmarks.bench.summary import summarise
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings
from services.router.tokens import Tokens
from speculation.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What to measure.

    Attributes:
        source: where the prompts come from, as given on the command line.
        seed: request number n has the seed ``seed + n``.
    """

    source: str
    prompts: tuple[Prompt, ...]
    schedule: Schedule
    seed: int


class Bench:
    """One run. ``results`` may be called at any time, also after an interruption.

    Attributes:
        runs: by request id, its answer with all passes, for the page at ``/``.
    """

    def __init__(
        self, config: BenchConfig, lineup: Lineup, settings: Settings, model: ResolvedModel, console: Console
    ) -> None:
        self.requests: list[Request] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self._config = config
        self._lineup = lineup
        self._settings = settings
        self._model = model
        self._console = console
        self._measured = Measurements()
        self._checks: list[differences.Check] = []
        self._differences: list[differences.Difference] = []
        self._started = datetime.now(UTC)
        self._environment = environment.describe(lineup.threads)

    def run(self) -> None:
        """Load all contestants, measure them, compare their answers.

        Raises:
            ConfigurationError: a prompt is too long.
            ContestantFailed: Outrider itself does not start.
        """
        self._lineup.load(self._telling)
        for name, why in self._lineup.missing.items():
            self._console.print(
                f"[yellow]{name}[/yellow] does not take part: {escape(why)}", soft_wrap=True, highlight=False
            )
        tokens = Tokens(str(self._model.path))
        self.requests = make_requests(self._config.prompts, tokens, self._ask_plain, self._config.seed)
        self._check_lengths()
        self._warm_up()
        try:
            with self._progress() as advance:
                measure(self._lineup.contestants, self.requests, self._config.schedule, self._measured, advance)
        finally:
            # Also after an interruption, so that the measurements so far are compared and kept.
            self._compare()
        self._record()

    @property
    def answers(self) -> dict[str, tuple[int, ...]]:
        """Plain decoding's answers by request id, as far as they were measured."""
        return differences.answers_by_request(self._cells(PLAIN), self.requests)[0]

    @property
    def failed(self) -> list[str]:
        """Outrider's strategies that failed or were never measured."""
        return [name for name in self._lineup.strategies if name in self._measured.failures or not self._cells(name)]

    @property
    def lossless(self) -> bool:
        """Whether all answers of Outrider's strategies equal those of plain decoding."""
        return all(check.lossless for check in self._checks if check.against == "plain" and check.contestant not in PEERS)

    @property
    def exact(self) -> bool:
        """Whether equal tokens are promised: in float32, if decoding is greedy or the acceptance rule is ``walk``."""
        walks = self._settings.router.acceptance == "walk" or self._config.schedule.temperature == 0
        return self._settings.verifier.dtype == "float32" and walks

    def results(self, *, partial: bool) -> dict[str, Any]:
        """The content of results.json."""
        measured = [name for name in self._lineup.peers if self._cells(name)]
        return {
            "format": FORMAT,
            "partial": partial,
            "started": self._started.isoformat(timespec="seconds"),
            "duration_s": (datetime.now(UTC) - self._started).total_seconds(),
            "settings": self._settings_object(measured),
            "environment": self._environment,
            "contestants": {name: self._contestant_object(name) for name in (*self._lineup.strategies, *self._lineup.peers)},
            "summary": summarise(self._measured.cells, PLAIN, measured),
            "lossless": {
                "checks": [asdict(check) for check in self._checks],
                "differences": [differences.as_object(difference) for difference in self._differences],
            },
            "cumulative_tokens": self._cumulative(),
            "requests": [_request_object(request) for request in self.requests],
            "cells": cells_as_objects(self._measured.cells),
        }

    # --- measuring ----------------------------------------------------------------------------------------------

    def _ask_plain(self, requests: Sequence[Request]) -> Sequence[TimedAnswer]:
        with self._telling(f"Answering the first turns of {len(requests)} conversations"):
            return self._lineup.contestants[0].run(self._order(requests, "conversations")).answers

    def _check_lengths(self) -> None:
        """Check that the context holds every prompt together with its answer.

        Raises:
            ConfigurationError: a prompt is too long; names it.
        """
        most, wanted = self._lineup.max_model_len, self._config.schedule.max_tokens
        for request in self.requests:
            if len(request.prompt) + wanted > most:
                raise ConfigurationError(
                    f"prompt {request.id}: its {len(request.prompt)} tokens and --max-tokens {wanted} exceed {most}, "
                    "the longest context here; leave it out, or lower --max-tokens",
                    about=f"prompt {request.id}",
                )

    def _warm_up(self) -> None:
        """Answer one short request with each contestant: the first one in a process is slower."""
        with self._telling("Warming up"):
            for contestant in self._lineup.contestants:
                try:
                    contestant.run(self._order(self.requests[:1], "warm-up", max_tokens=8))
                except ContestantFailed as error:
                    self._measured.failures[contestant.name] = str(error)

    def _record(self) -> None:
        """Have each request answered once more and told pass by pass: by the default strategy, if it takes part."""
        named = {contestant.name: contestant for contestant in self._lineup.contestants}
        default = self._settings.router.strategy
        name = default if default in self._lineup.strategies else self._lineup.strategies[-1]
        try:
            with self._telling(f"Recording the passes of {name}"):
                runs = named[name].record(self._order(self.requests, "recorded"))
        except ContestantFailed as error:
            self._console.print(
                f"[yellow]no passes in the traces:[/yellow] {escape(str(error))}", soft_wrap=True, highlight=False
            )
            return
        self.runs = {request.id: run for request, run in zip(self.requests, runs, strict=True)}

    def _order(self, requests: Sequence[Request], tenant: str, max_tokens: int | None = None) -> LoadPoint:
        schedule = self._config.schedule
        return LoadPoint(
            requests=tuple(requests),
            concurrency=1,
            max_tokens=max_tokens or schedule.max_tokens,
            temperature=schedule.temperature,
            tenant=tenant,
        )

    def _compare(self) -> None:
        greedy = self._config.schedule.temperature == 0
        # Peers use other random numbers, so their samples cannot be compared.
        comparable = [
            cell
            for cell in self._measured.cells
            if cell.contestant not in PEERS or (greedy and PEERS[cell.contestant].same_arithmetic)
        ]
        for against, name in (("plain", PLAIN), ("hf", "hf")) if greedy else (("plain", PLAIN),):
            reference, used = differences.answers_by_request(self._cells(name), self.requests)
            # The cells that gave the reference are left out.
            compared = [cell for cell in comparable if not any(cell is own for own in used)]
            checks, found = differences.check(compared, self.requests, against, reference)
            self._checks += checks
            # Sampled tokens cannot be explained by the model's unprocessed logits.
            self._differences += self._explain(found, reference) if greedy else found

    def _explain(self, found: list[differences.Difference], reference: differences.Answers) -> list[differences.Difference]:
        if not found:
            return []
        engine = self._lineup.transformers()

        def logits(tokens: Sequence[int], ids: Sequence[int]) -> dict[str, Any]:
            return engine.order({"do": "logits", "tokens": list(tokens), "ids": list(ids)})

        try:
            with self._telling(f"Computing the logits of {len(found)} differences"):
                return differences.explain(found, self.requests, reference, logits)
        except ContestantFailed as error:
            self._console.print(
                f"[yellow]cannot compute the logits of the differences:[/yellow] {escape(str(error))}", soft_wrap=True
            )
            return found

    # --- results ------------------------------------------------------------------------------------------------

    def _cells(self, contestant: str) -> list[Cell]:
        return [cell for cell in self._measured.cells if cell.contestant == contestant]

    def _cumulative(self) -> dict[str, list[float]]:
        least = min(self._config.schedule.concurrency)
        curves = {}
        for name in self._lineup.strategies:
            cells = [cell for cell in self._cells(name) if cell.concurrency == least]
            if cells:
                curves[name] = cumulative_tokens([answer for cell in cells for answer in cell.outcome.answers])
        return curves

    def _settings_object(self, peers: list[str]) -> dict[str, Any]:
        schedule = self._config.schedule
        return {
            "command": environment.typed(),
            "model": self._model.name,
            "dtype": self._settings.verifier.dtype,
            "device": self._settings.verifier.device,
            "on": "ray" if self._lineup.on_ray else "process",
            "prompts": self._config.source,
            "requests": len(self.requests),
            "base": PLAIN,
            "strategies": list(self._lineup.strategies),
            "effort": self._settings.router.effort,
            "peers": peers,
            "seed": self._config.seed,
            "max_tokens": schedule.max_tokens,
            "temperature": schedule.temperature,
            "repeats": schedule.repeats,
            "concurrency": list(schedule.concurrency),
        }

    def _contestant_object(self, name: str) -> dict[str, Any]:
        engine = self._lineup.engine_of(name)
        failure = self._measured.failures.get(name) or self._lineup.missing.get(name)
        notes = [failure] if failure else []
        if name in PEERS and not failure:
            notes += _limits(name, self._config.schedule)
            if self._lineup.on_ray:
                notes.append("Ray's processes keep running beside it")
        return {
            "status": ("failed" if name in self._measured.failures else "no part") if failure else "measured",
            "note": "; ".join(notes),
            "versions": engine.versions if engine else {},
            "peak_memory_bytes": engine.peak_memory_bytes if engine else 0,
        }

    # --- for people ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._console.status(what) if self._console.is_terminal else contextlib.nullcontext():
            yield
        self._console.print(f"[dim]{what}: {time.perf_counter() - start:.0f} s[/dim]", highlight=False)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[str], None]]:
        total = len(list(self._config.schedule.rounds(self.requests))) * len(self._lineup.contestants)
        if not self._console.is_terminal:
            yield _Lines(self._console, total)
            return
        columns = (
            TextColumn("Measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[last]}"),
        )  # fmt: skip
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("", total=total, last="")
            yield lambda name: progress.update(task, advance=1, last=name)


class _Lines:
    """Progress without a terminal: a line after each tenth."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._start = time.perf_counter()

    def __call__(self, contestant: str) -> None:
        before, self._done = self._done, self._done + 1
        if 10 * before // self._total < 10 * self._done // self._total:
            minutes = (time.perf_counter() - self._start) / 60
            self._console.print(f"Measured {self._done} of {self._total} in {minutes:.1f} minutes", highlight=False)


def _request_object(request: Request) -> dict[str, Any]:
    """A request with a hash in place of its prompt: results hold no text."""
    digest = hashlib.sha256(json.dumps(request.prompt).encode()).hexdigest()[:16]
    return {
        "id": request.id,
        "task": request.task,
        "prompt_tokens": len(request.prompt),
        "prompt_sha256": digest,
        "seed": request.seed,
    }


def _limits(peer: str, schedule: Schedule) -> list[str]:
    kind, notes = PEERS[peer], []
    if not kind.same_arithmetic:
        notes.append("different arithmetic: compared by speed, not by tokens")
    if kind.most_at_once is not None and max(schedule.concurrency) > kind.most_at_once:
        notes.append(f"answers at most {kind.most_at_once} at once")
    return notes
