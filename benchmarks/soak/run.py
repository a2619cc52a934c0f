"""Runs a soak: starts a service, asks for the right answers, lets users and faults loose, and keeps what was seen."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import outrider
from benchmarks.bench.environment import describe, typed
from benchmarks.bench.prompts import BUILTIN, read_prompts
from benchmarks.soak.component_process import Start, started_anew
from benchmarks.soak.doors import Doors
from benchmarks.soak.exchanges import Judged
from benchmarks.soak.faults import RandomFaults, SoakFault
from benchmarks.soak.mortal_redis import MortalRedis
from benchmarks.soak.published_index import published_index
from benchmarks.soak.requests import made_requests, plain_answers
from benchmarks.soak.resources import FEW_FILES, Usage, trends, usage_of
from benchmarks.soak.service_processes import ServiceLayout, ServiceProcesses
from benchmarks.soak.users import Tenant, Users, shared_out, tenants, write_keys
from benchmarks.soak.verdict import SoakVerdict, verdict_of
from cluster.models.target import ResolvedModel

STRATEGIES = ("auto", "blend", "prompt_lookup", "suffix", "recycling", "lookahead", "rest", "autoregressive")
REPLICAS = {"retrieval": 1, "drafter": 2, "verifier": 2, "router": 2}
# What is held for what is gone is given back within this time; a verifier's messages to a drafter may have been lost.
FREE_S = 60.0
_SILENCE_S = 20
# Each process is looked at about so often in a run, at most every tenth of a second.
_LOOKS = 600
_TEXTS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakConfig:
    """What a soak is.

    Attributes:
        users: users at once.
        every_s: mean seconds between two faults; 0: there are none.
        requests: different questions.
        redis: whether there is a retrieval index, in a Redis of its own.
        start_component: starts a component's process.
        logs: a folder for what components say; None: the terminal.
        settled_s: how long after the last user a descriptor may stay open before it is thought to stay.
    """

    minutes: float = 60.0
    users: int = 12
    every_s: float = 5.0
    seed: int = 0
    requests: int = 24
    redis: bool = True
    strategies: tuple[str, ...] = STRATEGIES
    start_component: Start = started_anew
    logs: Path | None = None
    settled_s: float = 45.0

    @property
    def seconds(self) -> float:
        return 60 * self.minutes


@dataclass(kw_only=True, slots=True)
class SoakRecord:
    """What was seen.

    Attributes:
        about: what the run was, and where, for its report.
        began_s: when the users began, on the clock of ``time.perf_counter``.
        held: what components still held at the end.
        files: descriptors of each process, before the first user (the most of any of its kind) and after the last one.
        ended: components whose process ended by itself.
    """

    about: dict[str, Any]
    began_s: float = 0.0
    judged: list[Judged] = field(default_factory=list)
    faults: list[SoakFault] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    partial: bool = False

    def verdict(self) -> SoakVerdict:
        """The verdict on it."""
        return verdict_of(self.judged, self.faults, self.held, trends(self.usage), self.files, self.ended)

    @property
    def progress(self) -> str:
        """What has happened so far, in a line."""
        counts = Counter(each.outcome for each in self.judged)
        return f"{counts['right']} right, {counts['error']} errors, {counts['broken']} wrong, {len(self.faults)} faults"


class SoakRun:
    """One run.

    Args:
        flags, config: settings of the service, as on a command line, and a file of them.
        told: hears what is done, and every second how far the users are (in seconds).
    """

    def __init__(
        self,
        wanted: SoakConfig,
        model: ResolvedModel,
        flags: Sequence[str] = (),
        config: Path | None = None,
        told: Callable[[str, float], None] = lambda words, seconds: None,
    ) -> None:
        self._wanted, self._model, self._flags, self._config, self._told = wanted, model, tuple(flags), config, told
        self._tenants = tenants()
        self._files: dict[str, int] = {}
        self.record = SoakRecord(about=self._about())

    def _about(self) -> dict[str, Any]:
        wanted = self._wanted
        return {
            "command": typed(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": wanted.seconds,
            "model": self._model.name,
            "users": wanted.users,
            "seed": wanted.seed,
            "tenants": [tenant.name for tenant in self._tenants],
            "strategies": list(self._strategies),
            "replicas": ", ".join(f"{count} x {role}" for role, count in self.replicas.items()),
            "environment": describe(1),
        }

    @property
    def replicas(self) -> dict[str, int]:
        """How many there are of each component."""
        return REPLICAS if self._wanted.redis else {**REPLICAS, "retrieval": 0}

    @property
    def _strategies(self) -> tuple[str, ...]:
        return tuple(name for name in self._wanted.strategies if self._wanted.redis or name != "rest")

    async def run(self) -> None:
        """Run it; ``record`` holds what was seen, also where it is cancelled in between."""
        texts = [prompt.turns[0] for prompt in read_prompts(BUILTIN)][:_TEXTS]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            index = published_index(self._model, texts, folder) if self._wanted.redis else nullcontext()
            with index as redis:
                await self._with_service(folder, redis)

    async def _with_service(self, folder: Path, redis: MortalRedis | None) -> None:
        write_keys(self._tenants, folder / "keys.yaml")
        flags = (
            f"server.keys_file={folder / 'keys.yaml'}",
            f"cache_dir={folder / 'cache'}",
            f"drafter.session_silence_s={_SILENCE_S}",
        )
        service = ServiceProcesses(
            ServiceLayout(
                model=self._model, flags=(*flags, *self._flags), config=self._config, replicas=self.replicas,
                redis=redis, start_component=self._wanted.start_component, logs=self._wanted.logs, seed=self._wanted.seed,
            )
        )  # fmt: skip
        try:
            self._told("Starting", 0.0)
            await service.start()
            await self._soak(service)
            self._told("Waiting until nothing is held", self._wanted.seconds)
            self.record.held = await service.until_free(FREE_S)
            before = _most_by_component(self._files)
            few = {role: count + FEW_FILES for role, count in before.items()}
            after = await service.settled_files(few, self._wanted.settled_s)
            self.record.files = {name: (before[name.split()[0]], count) for name, count in after.items()}
        finally:
            await service.stop()

    async def _soak(self, service: ServiceProcesses) -> None:
        wanted, record = self._wanted, self.record
        requests = made_requests(self._model.path, wanted.seed, wanted.requests)
        self._told("Asking for the right answers", 0.0)
        async with outrider.AsyncClient(service.address, api_key=self._tenants[0].key) as client:
            expected = await plain_answers(client, requests)
        self._files = await service.settled_files()
        with ThreadPoolExecutor(wanted.users, thread_name_prefix="http") as waiting:
            doors = Doors(grpc=service.address, http=service.http_address, waiting=waiting)
            users = Users(doors, requests, expected, self._strategies, record.judged.append)
            record.began_s, ends_at = time.perf_counter(), time.monotonic() + wanted.seconds
            watching = asyncio.create_task(self._watch(service))
            try:
                async with asyncio.TaskGroup() as group:
                    for number, tenant in enumerate(shared_out(self._tenants, wanted.users)):
                        group.create_task(self._user(users, tenant, number, ends_at))
                    if wanted.every_s:
                        faults = RandomFaults(service, wanted.every_s, wanted.seed)
                        group.create_task(faults.run(record.faults.append, wanted.seconds))
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _user(self, users: Users, tenant: Tenant, number: int, ends_at: float) -> None:
        await users.live(tenant, random.Random(f"{self._wanted.seed} {number}"), ends_at)

    async def _watch(self, service: ServiceProcesses) -> None:
        """Look at all processes again and again."""
        began = time.perf_counter()
        while True:
            at_s = time.perf_counter() - began
            for role, processes in service.processes.items():
                for number, process in enumerate(processes):
                    name = f"{role} {number}"
                    found = await asyncio.to_thread(usage_of, process.pid, name, process.lives, at_s)
                    if found is not None:
                        self.record.usage.append(found)
                    if process.ended and name not in self.record.ended:
                        self.record.ended.append(name)
            self._told(self.record.progress, at_s)
            await asyncio.sleep(max(0.1, self._wanted.seconds / _LOOKS))


def _most_by_component(files: Mapping[str, int]) -> dict[str, int]:
    """The most descriptors that a process of each component has."""
    most: dict[str, int] = {}
    for name, count in files.items():
        role = name.split()[0]
        most[role] = max(count, most.get(role, 0))
    return most
