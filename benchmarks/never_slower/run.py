"""Goes through the grid: topology by topology, repeat by repeat, cell by cell, and keeps every whole round at once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import outrider
from benchmarks.bench import environment
from benchmarks.bench.records import Prompt
from benchmarks.never_slower.cells import LONG, PLAIN, SHORT, GridCell, LoadTurn
from benchmarks.never_slower.kinds import PromptPool
from benchmarks.never_slower.load import answer_all, client_of
from benchmarks.never_slower.own_service import OwnService
from benchmarks.never_slower.record_file import FORMAT, KIND, PASSWORDS, check_same, read_record, turns_of, write_record
from benchmarks.never_slower.requests import RequestLimits, RoundRequests
from benchmarks.never_slower.rounds import measure_round
from benchmarks.never_slower.turns import Contestants, OneService, OwnServices, RoundPlan
from cluster.checks.preflight import preflight
from cluster.models.target import ResolvedModel
from cluster.service import serving
from cluster.settings.config import Settings
from cluster.settings.server import ServerSettings
from services.machine.processor import cores
from services.router.tokens import Tokens

# Around each turn: emptying the server's memory, the first answers, comparing.
_OVERHEAD_S = 2.5
_WARM_UP_REQUESTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class NeverSlowerConfig:
    """What to measure.

    Attributes:
        source: where the prompts come from, as given on the command line; ``prompts`` are the file's, if it is one.
    """

    source: str
    prompts: tuple[Prompt, ...]
    cells: tuple[GridCell, ...]
    plan: RoundPlan
    repeats: int
    max_tokens: int
    seed: int

    @property
    def estimate_s(self) -> float:
        """About how long all of it takes, if first answers come at once."""
        turns = len(self.plan.contestants)
        return self.repeats * sum(turns * (self.plan.seconds_of(cell) + _OVERHEAD_S) for cell in self.cells)


class NeverSlowerRun:
    """One run. ``record`` may be called at any time; ``folder`` always holds the last whole round.

    Attributes:
        exact: whether the server promises equal tokens, as far as it was asked.
        left_out: cells that cannot be measured here, and why.
    """

    def __init__(
        self, config: NeverSlowerConfig, settings: Settings, model: ResolvedModel, folder: Path, console: Console
    ) -> None:
        self.turns: list[LoadTurn] = []
        self.exact = True
        self.left_out: dict[str, str] = {}
        self._config, self._model, self._folder, self._console = config, model, folder, console
        # Only this process may reach the server.
        unseen = ServerSettings.model_validate({"port": 0, "http_port": None, "ops_port": None})
        most = max(settings.verifier.max_num_seqs, *(cell.at_once for cell in config.cells))
        verifier = settings.verifier.model_copy(update={"max_num_seqs": most})
        self._settings = settings.model_copy(update={"server": unseen, "verifier": verifier})
        self._pool = PromptPool(config.prompts)
        self._tokens = Tokens(str(model.path))
        self._started = datetime.now(UTC)
        # gRPC prints a traceback for calls that a client cancels; every turn ends with some.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        self._environment = environment.describe(settings.verifier.threads or cores())

    def resume(self) -> None:
        """Go on with what ``folder`` holds.

        Raises:
            ConfigurationError: there is nothing, or it must not be mixed with this run.
        """
        earlier = read_record(self._folder)
        check_same(earlier, self.record(partial=True))
        self.turns = turns_of(earlier)
        self.exact = bool(earlier["exact"])

    def run(self) -> None:
        """Measure what is still missing.

        Raises:
            ConfigurationError: the service does not start, or prompts do not fit into the model's context.
            OSError: results.json cannot be written.
        """
        done = {(turn.cell, turn.repeat) for turn in self.turns}
        for on in dict.fromkeys(cell.on for cell in self._config.cells):
            cells = [cell for cell in self._config.cells if cell.on == on]
            missing = [(n, cell) for n in range(self._config.repeats) for cell in cells if (cell, n) not in done]
            if not missing:
                continue
            if on == "process" and _may_be_many(self._settings):
                preflight(self._settings, self._model)
                asyncio.run(self._on_own_services(missing))
            else:
                with serving(self._settings, in_process=on == "process", verbose=False) as addresses:
                    asyncio.run(self._on_one_service(addresses.grpc, missing))

    def record(self, *, partial: bool) -> dict[str, Any]:
        """The content of results.json, without the verdict."""
        config, plan = self._config, self._config.plan
        digest = hashlib.sha256(repr(config.prompts).encode()).hexdigest()[:16]
        return {
            "kind": KIND,
            "format": FORMAT,
            "partial": partial,
            "started": self._started.isoformat(timespec="seconds"),
            "duration_s": (datetime.now(UTC) - self._started).total_seconds(),
            "exact": self.exact,
            "left_out": self.left_out,
            "settings": {
                "command": environment.typed(),
                "model": self._model.name,
                "dtype": self._settings.verifier.dtype,
                "served": self._settings.model_dump(
                    mode="json", include={"verifier", "drafter", "router"}, exclude={"router": PASSWORDS}
                ),
                "prompts": config.source,
                "prompts_digest": digest,
                "prompt_counts": self._pool.counts(),
                "strategies": list(plan.strategies),
                "base": PLAIN,
                "seconds": plan.seconds,
                "lead_s": plan.lead_s,
                "change_every_s": plan.change_every_s,
                "repeats": config.repeats,
                "max_tokens": config.max_tokens,
                "seed": config.seed,
                "on": list(dict.fromkeys(cell.on for cell in config.cells)),
            },
            "environment": self._environment,
            "turns": [turn.as_object() for turn in self.turns],
        }

    async def _on_own_services(self, missing: Sequence[tuple[int, GridCell]]) -> None:
        services: list[OwnService] = []
        try:
            for _ in self._config.plan.contestants:
                # One after the other: each measures its kernels.
                services.append(await OwnService.start(self._settings, self._model))
            await self._measure(OwnServices(services), missing)
        finally:
            for service in services:
                await service.close()

    async def _on_one_service(self, address: str, missing: Sequence[tuple[int, GridCell]]) -> None:
        async with client_of(address) as client:
            await self._measure(OneService(client, len(self._config.plan.contestants)), missing)

    async def _measure(self, contestants: Contestants, missing: Sequence[tuple[int, GridCell]]) -> None:
        plan = self._config.plan
        limits = await self._limits(contestants.clients[0])
        fitting = [(repeat, cell) for repeat, cell in missing if self._fits(cell, limits)]
        await self._warm_up(contestants, limits, fitting)
        with self._progress(len(fitting) * len(plan.contestants)) as (tell, advance):
            for repeat, cell in fitting:
                tell(f"{cell}, repeat {repeat + 1}")
                requests = self._requests(limits, cell, repeat)
                self.turns += await measure_round(contestants, requests, cell, repeat, plan, advance)
                write_record(self._folder, self.record(partial=True))

    async def _limits(self, client: outrider.AsyncClient) -> RequestLimits:
        model = (await client.models())[0]
        self.exact = self.exact and model.bit_exact and self._settings.router.acceptance == "walk"
        config = self._config
        return RequestLimits(max_tokens=config.max_tokens, max_model_len=model.max_model_len, seed=config.seed)

    def _fits(self, cell: GridCell, limits: RequestLimits) -> bool:
        needs = limits.long_tokens + limits.max_tokens
        if cell.length != LONG or needs <= limits.max_model_len:
            return True
        self.left_out[str(cell)] = f"it needs {needs} tokens, the longest context here is {limits.max_model_len}"
        return False

    def _requests(self, limits: RequestLimits, cell: GridCell, repeat: int) -> RoundRequests:
        # Every round of the run begins elsewhere, and the same run at the same places.
        digest = hashlib.sha256(f"{cell}/{repeat}/{self._config.seed}".encode()).digest()
        return RoundRequests(self._pool, self._tokens, limits, cell, int.from_bytes(digest[:3]))

    async def _warm_up(
        self, contestants: Contestants, limits: RequestLimits, missing: Sequence[tuple[int, GridCell]]
    ) -> None:
        """A few answers by each contestant, not recorded: the first ones in a process are slower."""
        if not missing:
            return
        cell = GridCell(on=missing[0][1].on, at_once=1, kind=missing[0][1].kind, temperature=0.0, length=SHORT)
        following = self._requests(limits, cell, -1).supply(1.0)
        requests = [following(0.0) for _ in range(_WARM_UP_REQUESTS)]
        for client, strategy in zip(contestants.clients, self._config.plan.contestants, strict=True):
            await answer_all(client, requests, 2, strategy, 0.0)

    @contextmanager
    def _progress(self, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task("", total=total)
            yield lambda text: bars.update(task, description=text), lambda: bars.advance(task)


def _may_be_many(settings: Settings) -> bool:
    """Whether services with these settings share nothing: what one has seen of a prompt, no other knows."""
    return not settings.router.verifiers and settings.drafter.address is None and settings.retrieval.redis_url is None
