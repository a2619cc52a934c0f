"""Loads and unloads the adapters of a verifier while it serves, step by step, so that all verifiers of a service agree."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from services.abandoned import to_the_end
from services.verifier.changing.own_thread import in_own_thread
from services.verifier.engine.identity import check_begun, with_adapter
from services.verifier.loading.allowed_folder import allowed_folder
from services.verifier.model.target import TransformersTarget
from speculation.adapters import AdapterOrder
from speculation.errors import InvalidArgument, NotBegun, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress

Answering = Callable[[GenerationRequest], AsyncGenerator[Progress | Finished, None]]
# Orders to load that were taken back last.
_TAKEN_BACK = 64


class Adapting:
    """The adapters of one target, and the answers that are under way with each.

    Args:
        folders: those from which adapters may be loaded.
        reading: held while files are read, adapters or weights: adapters are checked against the weights that serve.
        replacing: whether weights have been read that may take the place of these.
    """

    def __init__(
        self, target: TransformersTarget, folders: Sequence[Path], reading: asyncio.Lock, replacing: Callable[[], bool]
    ) -> None:
        self._target = target
        self._folders = folders
        self._reading, self._replacing = reading, replacing
        self._under_way: Counter[str] = Counter()
        # By adapter: the order that has loaded it, and the one that has closed it.
        self._loaded_by: dict[str, str] = {}
        # Files are read on though whoever asked has gone, so that an order may be taken back before it has been followed.
        self._taken_back: deque[str] = deque(maxlen=_TAKEN_BACK)
        self._closed_by: dict[str, str] = {}
        # Until when its router may still say what becomes of it, in seconds of the event loop's clock.
        self._closed_until: dict[str, float] = {}
        self._ended = asyncio.Event()

    async def answering(
        self, request: GenerationRequest, answer: Answering, arithmetic: str
    ) -> AsyncGenerator[Progress | Finished, None]:
        """The events of an answer with an adapter; the first tokens say by which arithmetic they were chosen.

        Args:
            answer: gives the events of a request, by the target without an adapter, as far as it knows.
            arithmetic: that target's. Weights may be replaced before the first token, or before the answer goes on here.

        Raises:
            NotBegun: the adapter is not here, or is about to go; or the answer was begun by another arithmetic.
        """
        name = request.adapter
        digest = self._target.adapters.get(name)
        if digest is None or (self._closed(name) and not request.committed):
            raise NotBegun(f"the verifier has no adapter {name}")
        check_begun(request, with_adapter(arithmetic, digest))
        self._under_way[name] += 1
        try:
            async with aclosing(answer(replace(request, arithmetic=arithmetic))) as events:
                async for event in events:
                    if isinstance(event, Progress) and event.arithmetic:
                        event = replace(event, arithmetic=with_adapter(event.arithmetic, digest))
                    yield event
        finally:
            self._under_way[name] -= 1
            self._ended.set()

    async def obey(self, order: AdapterOrder) -> str:
        """As ``VerifierPort.adapt``."""
        match order.step:
            case "load":
                return await self._load(order)
            case "undo":
                self._taken_back.append(order.order_id)
                self._undo(order)
            case "close":
                await self._close(order)
            case "open":
                if self._closed_by.get(order.name) == order.order_id:
                    del self._closed_by[order.name]
            case "drop":
                if self._closed_by.get(order.name) == order.order_id:
                    self._drop(order.name)
                elif order.name in self._target.adapters:
                    raise Unavailable(f"the adapter {order.name} serves here again, as this comes too late: unload it again")
        return ""

    async def _load(self, order: AdapterOrder) -> str:
        def load() -> str:
            # Here as well, since a disk may be slow.
            folder = allowed_folder("lora_path", order.folder, "verifier.lora_folders", self._folders)
            return self._target.load_adapter(order.name, folder)

        async with self._reading:
            if self._replacing():
                raise Unavailable("the weights are being replaced at present; try again")
            if order.order_id in self._taken_back:
                raise Unavailable(f"the order to load the adapter {order.name} was taken back")
            if order.name not in self._target.adapters:
                self._loaded_by[order.name] = order.order_id
            try:
                # Whoever stops to wait has it undone, which must find what was loaded.
                digest = await to_the_end(in_own_thread(load, "adapter"))
            finally:
                if order.order_id in self._taken_back:
                    self._undo(order)
        # Whoever closed it may be gone.
        self._closed_by.pop(order.name, None)
        return digest

    def _undo(self, order: AdapterOrder) -> None:
        if self._loaded_by.get(order.name) == order.order_id and order.name in self._target.adapters:
            self._drop(order.name)

    async def _close(self, order: AdapterOrder) -> None:
        name, now = order.name, asyncio.get_running_loop().time()
        closed_by = self._closed_by.get(name, order.order_id)
        if closed_by != order.order_id and now < self._closed_until[name]:
            raise Unavailable(f"the adapter {name} is being unloaded already")
        # The router of an earlier order is gone, or could not reach this verifier.
        self._closed_by[name] = order.order_id
        # Here and at the other verifiers answers are waited for.
        self._closed_until[name] = now + 2 * order.within_s
        try:
            async with asyncio.timeout(order.within_s):
                while self._under_way[name]:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            # It may have been loaded once more meanwhile.
            if self._closed_by.get(name) == order.order_id:
                del self._closed_by[name]
            count = self._under_way[name]
            using = f"{count} answers are" if count > 1 else "an answer is"
            allowed = f"an adapter that is not in use: {using} still written with it after {order.within_s:g} s"
            raise InvalidArgument("lora_name", name, allowed) from None

    def _closed(self, name: str) -> bool:
        """Whether an adapter is about to go, as far as a router still says what becomes of it."""
        if name in self._closed_by and asyncio.get_running_loop().time() >= self._closed_until[name]:
            del self._closed_by[name]
        return name in self._closed_by

    def _drop(self, name: str) -> None:
        self._closed_by.pop(name, None)
        self._loaded_by.pop(name, None)
        if name in self._target.adapters:
            self._target.unload_adapter(name)
