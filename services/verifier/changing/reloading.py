"""Replaces the weights of a verifier while it serves, step by step, so that all verifiers of a service change together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.abandoned import to_the_end
from services.verifier.changing.own_thread import in_own_thread
from services.verifier.config import TargetConfig
from services.verifier.engine.identity import Identity
from services.verifier.engine.loop import DecodingLoop
from services.verifier.loading.allowed_folder import allowed_folder
from services.verifier.loading.replaceable import check_replaceable, check_supported
from services.verifier.model.new_weights import NewWeights
from services.verifier.model.target import TransformersTarget
from speculation import limits
from speculation.errors import ConfigurationError, Unavailable
from speculation.reloads import PauseMode, ReloadOrder

log = logging.getLogger(__name__)

# Seconds that whoever orders a reload may be silent.
_SILENT_S = 60.0


class Reloading:
    """The reloads of one verifier, one at a time. Whoever orders one and falls silent has it undone.

    Args:
        allowed: folders that weights may be read from.
        arithmetic_of: gives the arithmetic of a target with other weights, from their digest.

    Attributes:
        reading: held while weights are read.
    """

    def __init__(
        self,
        target: TransformersTarget,
        served: TargetConfig,
        loop: DecodingLoop,
        allowed: tuple[Path, ...],
        arithmetic_of: Callable[[str], str],
    ) -> None:
        self._target = target
        self._served = served
        self._loop = loop
        self._allowed = allowed
        self._arithmetic_of = arithmetic_of
        self._one_step = asyncio.Lock()
        self.reading = asyncio.Lock()
        self._open: _Reload | None = None
        self._settled = asyncio.Event()
        self._settled.set()
        # The last one that was kept, the folder and the digest of its weights, and how they are stored.
        self._kept = self._folder = self._digest = self._stored = ""
        # Whether a pause has begun or ended here, how the last one began, its id, and that of the one that was joined late.
        self._has_paused = False
        self._pause_id = ""
        self._mode: PauseMode = "keep"
        self._joined: str | None = None
        self._waiting: asyncio.TimerHandle | None = None
        self._undoing: asyncio.Task[None] | None = None
        # Gives memory back.
        self._dropping: asyncio.Task[None] | None = None

    async def obey(self, order: ReloadOrder) -> str:
        """As ``VerifierPort.reload``."""
        if order.step == "go":
            self._go()
        if order.step in ("go", "held"):
            return "held" if self._loop.hold.on else ""
        if order.step == "alive":
            if self._under_way(order.reload_id) is not None:
                self._expect_more(order)
            return ""
        async with self._one_step:
            if order.step == "undo":
                if order.reload_id == self._joined:
                    self._go()
                await self._undo(order.reload_id)
                return ""
            if order.step in ("hold", "join"):
                return await self._hold(order)
            if order.step == "read":
                return await self._read(order)
            if order.step == "keep" and order.reload_id == self._kept:
                return self._digest
            found = self._under_way(order.reload_id)
            if found is None:
                raise Unavailable("no such reload is under way here: the verifier was restarted, or has given it up")
            # Nobody is silent while the step is taken here.
            self._expect_nothing()
            try:
                if order.step == "pause":
                    await self._pause(order)
                elif order.step == "replace":
                    # Once, however often it is ordered.
                    if not found.replaced:
                        await self._exchange(found, found.identity)
                else:
                    self._keep(found)
            finally:
                if self._open is not None:
                    self._expect_more(order)
            return found.weights.digest

    @property
    def open(self) -> bool:
        """Whether weights have been read that may take the place of those that serve."""
        return self._open is not None

    @property
    def paused(self) -> PauseMode | None:
        """How decoding was paused; None: it is not."""
        return self._mode if self._loop.hold.on else None

    @property
    def pause_id(self) -> str:
        """Which pause that is; empty: none."""
        return self._pause_id if self._loop.hold.on else ""

    @property
    def stored(self) -> str:
        """How the weights that have taken the place of the first ones are stored; empty: none have."""
        return self._stored

    async def replaced(self) -> tuple[str, str]:
        """The folder and the digest of the weights that have taken the place of the first ones; empty: none have."""
        await self._settled.wait()
        return self._folder, self._digest

    async def take(self, folder: str, digest: str) -> None:
        """Serve these weights, once the answers under way have ended.

        Raises:
            OutriderError: they cannot be served, or are others.
        """
        order = ReloadOrder(reload_id=f"taken {digest}", step="read", folder=folder, within_s=limits.RELOAD_S)
        try:
            if await self.obey(order) != digest:
                raise ConfigurationError(
                    f"the weights in {folder} are not those that the other verifiers have read there: replace them once "
                    "more",
                    about=folder,
                )
            for step in ("pause", "replace", "keep"):
                await self.obey(replace(order, step=step))
        except BaseException:
            await self.obey(replace(order, step="undo"))
            raise

    async def _read(self, order: ReloadOrder) -> str:
        if self._open is not None:
            raise Unavailable("the weights are being replaced already; try again")
        if self._loop.hold.on and (left := len(self._loop.pause.under_way)):
            raise Unavailable(
                f"decoding is paused with answers under way ({left} of them), and no answer is written by two versions: "
                "resume first (replacing weights pauses by itself), or pause with mode wait"
            )

        def loaded() -> tuple[NewWeights, str]:
            weights = self._loaded(order.folder)
            # In the thread as well, since it may look at files.
            return weights, self._arithmetic_of(weights.digest)

        async with self.reading:
            if self._dropping is not None:
                # The new ones may need the memory.
                await asyncio.wait([self._dropping])
            # Not beside the next one, should whoever has asked for this one have gone.
            work = in_own_thread(loaded, "weights")
            try:
                weights, arithmetic = await to_the_end(work)
            except asyncio.CancelledError:
                if not work.cancelled() and work.exception() is None:
                    self._drop(work.result()[0])
                raise
            identity = replace(self._loop.identity, arithmetic=arithmetic)
            self._open = _Reload(order, weights, identity, self._loop.identity)
        self._settled.clear()
        self._expect_more(order)
        return weights.digest

    def _loaded(self, named: str) -> NewWeights:
        check_supported(self._served)
        if not self._allowed:
            raise ConfigurationError(
                "name the folders that new weights may be read from", field="verifier.weights_from", value="empty"
            )
        folder = allowed_folder("folder", named, "verifier.weights_from", self._allowed)
        config = replace(self._served, model_path=str(folder))
        check_replaceable(config, self._served, self._target.generation)
        return self._target.new_weights(config)

    async def _hold(self, order: ReloadOrder) -> str:
        if order.step == "join" and self._loop.hold.on:
            return "held"
        if order.step == "join" and self._has_paused:
            raise ConfigurationError("decoding was resumed")
        if self._open is not None:
            raise Unavailable("the weights are being replaced at present; try again")
        self._mode = "wait" if order.within_s else "keep"
        if order.within_s:
            # What an earlier pause has kept ends, too.
            self._loop.hold.end()
            await self._pause(order)
        try:
            await self._loop.hold.begin()
        finally:
            self._loop.pause.end()
        self._has_paused, self._pause_id = True, order.reload_id
        self._joined = order.reload_id if order.step == "join" else None
        return "held"

    def _go(self) -> None:
        self._has_paused, self._joined = True, None
        self._loop.hold.end()
        if self._open is None:
            # One that waits for answers to end.
            self._loop.pause.give_up()

    async def _pause(self, order: ReloadOrder) -> None:
        if not self._loop.healthy:
            raise Unavailable("the verifier is not decoding at present; try again")
        await self._loop.pause.begin(restart=order.running == "restart", within_s=order.within_s)

    def _keep(self, found: _Reload) -> None:
        weights = found.weights
        log.info("the weights in %s serve now (%s)", weights.config.model_path, found.identity.arithmetic)
        self._kept, self._digest = found.order.reload_id, weights.digest
        self._folder, self._stored = weights.config.model_path, weights.stored
        self._close()

    async def _exchange(self, found: _Reload, identity: Identity) -> None:
        """Choose tokens by the other weights from now on."""
        # A thread that has begun does it, whoever has gone meanwhile, and then all must know.
        await to_the_end(asyncio.create_task(self._exchanged(found, identity)))

    async def _exchanged(self, found: _Reload, identity: Identity) -> None:
        await self._loop.change(partial(self._target.exchange, found.weights))
        found.replaced, self._loop.identity = not found.replaced, identity
        self._loop.pause.refuse_moved()

    async def _undo(self, reload_id: str) -> None:
        found = self._under_way(reload_id)
        if found is None:
            return
        if found.replaced:
            await self._exchange(found, found.before)
        log.warning("the weights in %s do not serve: the reload is undone", found.weights.config.model_path)
        self._close()

    def _close(self) -> None:
        self._expect_nothing()
        found, self._open = self._open, None
        self._settled.set()
        self._loop.pause.end()
        if found is not None:
            self._drop(found.weights)

    def _drop(self, weights: NewWeights) -> None:
        self._dropping = asyncio.create_task(_dropped(weights), name="drop-weights")

    def _under_way(self, reload_id: str) -> _Reload | None:
        return self._open if self._open is not None and self._open.order.reload_id == reload_id else None

    def _expect_nothing(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _expect_more(self, order: ReloadOrder) -> None:
        self._expect_nothing()
        self._waiting = asyncio.get_running_loop().call_later(_SILENT_S, self._give_up, order.reload_id)

    def _give_up(self, reload_id: str) -> None:
        log.error("the router that replaces the weights has been silent for %g s", _SILENT_S)
        self._undoing = asyncio.create_task(self._undo_alone(reload_id), name="undo-reload")

    async def _undo_alone(self, reload_id: str) -> None:
        async with self._one_step:
            await self._undo(reload_id)


async def _dropped(weights: NewWeights) -> None:
    try:
        await asyncio.to_thread(weights.drop)
    except RuntimeError:
        # No thread can be started.
        weights.drop()


class _Reload:
    """One that is under way: its new weights, and what tokens are chosen by with them and were before."""

    def __init__(self, order: ReloadOrder, weights: NewWeights, identity: Identity, before: Identity) -> None:
        self.order = order
        self.weights = weights
        self.identity = identity
        self.before = before
        self.replaced = False
