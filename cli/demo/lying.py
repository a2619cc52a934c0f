"""A drafter that turns hostile: from a moment on, all that it sends is garbage."""

from __future__ import annotations

import random
from dataclasses import replace

from speculation.columns import DraftColumns
from speculation.messages import Draft, DraftingReply
from speculation.ports import DraftLink, DraftReceiver
from speculation.types import TokenTree

_NODES = 8
# Ids that every model has.
_TOKENS = 1000


class LyingLink:
    """A link whose drafts are replaced by trees of random tokens, said to be certain, while ``lies`` is set.

    What else a ``DraftLink`` does, the honest one behind it does.

    Attributes:
        lies: whether it lies now.
        told: lies so far.
    """

    def __init__(self, honest: DraftLink) -> None:
        self._honest = honest
        self.lies = False
        self.told = 0
        self.open, self.step, self.steps, self.features = honest.open, honest.step, honest.steps, honest.features
        self.close, self.forget, self.stop = honest.close, honest.forget, honest.stop

    @property
    def connected(self) -> bool:
        return self._honest.connected

    async def start(self, receiver: DraftReceiver) -> None:
        await self._honest.start(_Replacing(receiver, self))

    def replaced(self, reply: DraftingReply) -> DraftingReply:
        """The reply, or a lie in its place."""
        if not self.lies or not isinstance(reply, Draft):
            return reply
        self.told += 1
        # Every third is no tree at all: its nodes hang on nodes that do not exist.
        parents = tuple(range(-1, _NODES - 1)) if self.told % 3 else (7,) * _NODES
        tree = TokenTree(
            tokens=tuple(random.randrange(_TOKENS) for _ in range(_NODES)),
            parents=parents,
            sources=("suffix",) * _NODES,
            scores=(1.0,) * _NODES,
        )
        return replace(reply, tree=tree)


class _Replacing:
    """Implements ``DraftReceiver`` in front of the verifier's."""

    def __init__(self, receiver: DraftReceiver, link: LyingLink) -> None:
        self._receiver = receiver
        self._link = link

    def on_reply(self, reply: DraftingReply) -> None:
        self._receiver.on_reply(self._link.replaced(reply))

    def on_drafts(self, drafts: DraftColumns) -> None:
        if not self._link.lies:
            self._receiver.on_drafts(drafts)
            return
        for draft in drafts.alone():
            self.on_reply(draft)

    def on_connected(self) -> None:
        self._receiver.on_connected()
