"""The components as processes: the product's own services, deployments and links, on simulated machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from cluster.ray.calling_routers import CallingRouters
from cluster.ray.deployments import DrafterDeployment, VerifierDeployment
from cluster.ray.open_streams import OpenStreams
from cluster.ray.serve_link import ServeVerifierLink
from cluster.ray.shared_weights import go_on_asking, take_weights_of_others
from outrider.internal.v1 import drafting_pb2_grpc, retrieval_pb2_grpc
from services.access.gate import Gate
from services.access.key_records import KeyRecord
from services.drafter.config import DrafterConfig, SuffixConfig
from services.drafter.service import DrafterService
from services.links.grpc_draft import GrpcDraftLink, _DraftingServicer
from services.links.grpc_retrieval import GrpcRetrievalLink, _RetrievalServicer
from services.retrieval.config import RetrievalConfig
from services.retrieval.service import RetrievalService
from services.router.config import RouterConfig
from services.router.service import RouterService
from services.router.strategies import StrategyConfig
from services.verifier.changing.reloading import Reloading
from services.verifier.checks.self_check import SelfCheck
from services.verifier.config import TargetConfig, VerifierConfig
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.identity import Identity
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.origins import Origin
from services.verifier.engine.registered_models import RegisteredModels
from services.verifier.service import VerifierService
from speculation.budget import Budget, FixedBudget
from speculation.errors import OutriderError
from speculation.messages import ServedWeights
from speculation.ports import Drafter, VerifierLink
from tests.engine.simulated import SimulatedBudget
from tests.simulation.assets import SharedGrammars, assets
from tests.simulation.drafters import HostileDrafter, KnowingDrafter
from tests.simulation.drafting_thread import SimulatedThread
from tests.simulation.fault_points import FaultPoints
from tests.simulation.gates import Audit, Keys
from tests.simulation.grpc_streams import Server, Servers, SimulatedTls
from tests.simulation.inside import newcomer_first, used_and_free, waited_too_long
from tests.simulation.network import Network
from tests.simulation.patched import STREAMS
from tests.simulation.schedule import MAX_NODES
from tests.simulation.serve_handles import Handle
from tests.simulation.target import LawfulTarget, SimulatedWeights, Worker
from tests.simulation.virtual_loop import Process, VirtualLoop

# Seconds that text sources' calls and reading weights take, and after which a drafter closes a silent session.
_DRAFT_S, _READ_S, SILENCE_S = 0.0005, 0.5, 60.0


# How often Serve tries to start a replica that says that it cannot.
_STARTS = 1000


class Component:
    """A component that is killed and started again.

    Attributes:
        process: the present one.
        listed: Serve tells routers of it.
    """

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name = name
        self.loop = loop
        self.process = Process(name)
        self.listed = False
        self.lives = 0

    async def start(self) -> None:
        """Start, in its process."""
        self.lives += 1
        for _ in range(_STARTS):
            self.process = Process(self.name)
            try:
                await self.loop.start(self.process, self._start())
                break
            except OutriderError:
                # It says why, and Serve tries again.
                self.loop.kill(self.process)
                await asyncio.sleep(1.0)
        self.listed = True

    async def _start(self) -> None:
        raise NotImplementedError

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.listed and not self.process.dead


class SimulatedReloading(Reloading):
    """As ``Reloading``, of weights that lie nowhere."""

    @override
    def _loaded(self, named: str) -> Any:
        loop: Any = asyncio.get_event_loop()
        loop.blocked_s += _READ_S
        return SimulatedWeights(int(named))


_Deployment: Any = VerifierDeployment.func_or_class


class VerifierMethods(_Deployment):  # type: ignore[misc]
    """The deployment's. Nobody awaits its end here."""

    @override
    def __del__(self) -> None:
        pass


class VerifierMachine(Component):
    """A verifier: deployment, service, loop and links are the product's, the target is ``LawfulTarget``.

    Args:
        drafters: the addresses of its origins.
        tell: gets what is found to be wrong inside.
        others: makes a handle of all verifiers, which one that starts asks for their weights; None: it does not.
    """

    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        network: Network,
        servers: Servers,
        faults: FaultPoints,
        drafters: Sequence[str],
        config: LoopConfig,
        *,
        blocks: int,
        measured: bool,
        pass_s: float,
        weights: int,
        kept_states: int | None,
        stages: int,
        tell: Callable[[str], None],
        others: Callable[[], Handle] | None,
    ) -> None:
        super().__init__(name, loop)
        self._others = others
        self._network, self._servers, self._faults, self._drafters = network, servers, faults, drafters
        self._config, self._blocks, self._measured, self._pass_s = config, blocks, measured, pass_s
        self._weights, self._kept_states, self._stages, self._tell = weights, kept_states, stages, tell
        # Requests that got room, with the time.
        self.opened: list[tuple[float, str]] = []
        self.methods: Any = None

    def _opens(self, request_id: str) -> None:
        self.opened.append((self.loop.time(), request_id))
        for wrong in (
            newcomer_first(self.engine, request_id),
            waited_too_long(self.engine, request_id, self.loop.time()),
            used_and_free(self.target.blocks),
        ):
            if wrong is not None:
                self._tell(f"{self.name}: {wrong}")

    @override
    async def _start(self) -> None:
        self.target = LawfulTarget(
            assets().vocab_size, 512, self._blocks, self._faults, self._opens, self._weights, self._kept_states, self._stages
        )
        self.worker = Worker(self._pass_s, self._faults)
        tls: Any = SimulatedTls(self._servers, self._network, self._faults, "drafts")
        origins = [
            Origin(name=name, link=GrpcDraftLink(_always(name), tls=tls), trusted=name != "hostile")
            for name in self._drafters
        ]
        budget: Budget = SimulatedBudget(self._pass_s, MAX_NODES) if self._measured else FixedBudget(max_nodes=MAX_NODES)
        worker: Any = self.worker
        identity = Identity(arithmetic=f"law {self._weights}")
        grammars = SharedGrammars()
        self.engine = DecodingLoop(self.target, origins, budget, self._config, worker, grammars=grammars, identity=identity)
        service: Any = VerifierService.__new__(VerifierService)
        service.loop, service._target, service._origins, service._grammars = self.engine, self.target, origins, grammars
        service._config = VerifierConfig(model_name="lawful", target=TargetConfig(model_path=str(assets().folder)))
        service._check, service._weights = SelfCheck(self.engine, 0), ServedWeights()
        service._registered = RegisteredModels(origins, self.target.check_layers, "", False)
        self.reloading = service._reloading = SimulatedReloading(
            service._target, service._config.target, self.engine, (), str
        )
        await service.start()
        if self._others is not None:
            own = SimpleNamespace(app_name=Handle.app_name, deployment="verifier")
            handle = self._others()
            serve = SimpleNamespace(get_replica_context=lambda: own, get_deployment_handle=lambda *_, **__: handle)
            ask_others = partial(take_weights_of_others, service.take_weights, serve=serve)
            await ask_others()
            self._asking = asyncio.create_task(go_on_asking(service.replaced_weights, ask_others))
        # The deployment without Serve's decoration, and without what it makes of settings.
        self.methods = VerifierMethods.__new__(VerifierMethods)
        self.methods._verifier = self.methods._observed = service
        self.methods._callers = CallingRouters(self.loop.time)
        self._watching = asyncio.create_task(self.methods._callers.watch())


class DrafterMachine(Component):
    """A drafter behind its gRPC server.

    Args:
        kind: "text": the product's; "knowing" and "hostile": those of ``drafters``.
        retrieval: the address of an index; None: there is none.
    """

    def __init__(
        self, name: str, loop: VirtualLoop, network: Network, servers: Servers, faults: FaultPoints, kind: str,
        retrieval: str | None, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(name, loop)
        self._network, self._servers, self._faults = network, servers, faults
        self._kind, self._retrieval, self._seed = kind, retrieval, seed
        self.methods: Any = None

    @override
    async def _start(self) -> None:
        self.drafter = await self._made()
        server: Any = Server(self.process)
        servicer = _DraftingServicer(self.drafter, SILENCE_S, lambda context: nullcontext())
        drafting_pb2_grpc.add_DraftingServiceServicer_to_server(servicer, server)
        self._servers.listening[self.name] = server
        # Not one of the class: its end would have to be awaited.
        forget = DrafterDeployment.func_or_class.forget
        self.methods = SimpleNamespace(forget=partial(forget, SimpleNamespace(_drafter=self.drafter)))

    async def _made(self) -> Drafter:
        if self._kind == "knowing":
            return KnowingDrafter()
        if self._kind == "hostile":
            return HostileDrafter(self._seed)
        link = None
        if self._retrieval is not None:
            tls: Any = SimulatedTls(self._servers, self._network, self._faults, "retrieval")
            link = GrpcRetrievalLink(_always(self._retrieval), tls=tls)
            await link.start()
        config = DrafterConfig(suffix=SuffixConfig(max_cached_tokens=1000), retrieval_deadline_s=0.05)
        return DrafterService(config, link, SimulatedThread(lambda: _DRAFT_S))

    @property
    def sessions(self) -> int:
        """Open sessions."""
        found = self.drafter.sessions
        return found if isinstance(found, int) else len(found)


class RetrievalMachine(Component):
    """A retrieval service behind its gRPC server; its index lies in a simulated Redis."""

    def __init__(self, name: str, loop: VirtualLoop, servers: Servers) -> None:
        super().__init__(name, loop)
        self._servers = servers
        self.methods: Any = None

    @override
    async def _start(self) -> None:
        self.service = RetrievalService(RetrievalConfig(redis_url="redis://simulated", cache_dir=assets().cache))
        await self.service.start()
        server: Any = Server(self.process)
        retrieval_pb2_grpc.add_RetrievalServiceServicer_to_server(
            _RetrievalServicer(self.service, lambda context: nullcontext()), server
        )
        self._servers.listening[self.name] = server


class RouterMachine(Component):
    """A router with its gate.

    Attributes:
        streams: as ``OPEN_STREAMS``, of which every process has its own.
    """

    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        records: Sequence[KeyRecord],
        handles: Callable[[OpenStreams], tuple[Any, Any]],
        *,
        retrieval: bool,
        timeout_s: float,
    ) -> None:
        super().__init__(name, loop)
        self._records, self._handles, self._retrieval, self._timeout_s = list(records), handles, retrieval, timeout_s
        self.audit = Audit(loop.time)

    @override
    async def _start(self) -> None:
        self.streams = OpenStreams()
        self.process.context.run(STREAMS.set, self.streams)
        self.keys = Keys(self._records)
        self.gate = Gate(self.keys, self.audit, clock=self.loop.time, now=self.loop.time)
        self.link = ServeVerifierLink(*self._handles(self.streams))
        link: VerifierLink = self.link
        config = RouterConfig(
            model_path=str(assets().folder),
            strategy=StrategyConfig(retrieval=self._retrieval),
            migration_timeout_s=self._timeout_s,
        )
        self.service = RouterService(config, link, tokens=assets().tokens)

    def replace_key(self, before: str, record: KeyRecord) -> None:
        """A key, by its hash, gives way to another one with the same id; who was revoked stays so until the router's end."""
        self._records = [record if each.hash == before else each for each in self._records]
        if self.up:
            self.keys.replace(before, record)


def _always(address: str) -> Callable[[], Any]:
    async def resolve() -> str:
        return address

    return resolve
