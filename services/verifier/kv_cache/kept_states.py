"""Which blocks of the KV cache have the state at their end kept, of models whose layers have states.

Keys and values of a prefix alone do not tell what follows it: a layer with a state needs the state there as well. So every
``every`` tokens, at the border of a block, a copy of the request's state is kept in a slot, for as long as the block is
shared. When all slots are taken, the state at the block that is idle for longest gives way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.verifier.kv_cache.pool import BLOCK


class KeptStates:
    """Hands out ``slots`` slots, numbered from 0 on; touches no tensor.

    Args:
        every: tokens from one border to the next, in whole blocks.
    """

    def __init__(self, slots: int, every: int) -> None:
        self._every = every
        self._free = list(range(slots))
        self._slots: dict[int, int] = {}

    def slot_of(self, block: int) -> int | None:
        """Where the state at the block's end is kept; None: it is not."""
        return self._slots.get(block)

    def borders(self, begin: int, end: int) -> range:
        """Numbers of tokens at which states are kept, above ``begin`` and up to ``end``."""
        return range((begin // self._every + 1) * self._every, end + 1, self._every)

    def reach(self, blocks: Sequence[int]) -> int:
        """How many of a text's first ``blocks`` lie before the last kept state in them."""
        step = self._every // BLOCK
        borders = range(len(blocks) // step * step, 0, -step)
        return next((count for count in borders if blocks[count - 1] in self._slots), 0)

    def take(self, idle: Iterable[int]) -> int | None:
        """A slot for a state; None: all are taken by blocks that are in use.

        Args:
            idle: blocks whose states may give way, the first one first.
        """
        if not self._free:
            given_up = next((block for block in idle if block in self._slots), None)
            if given_up is None:
                return None
            self.drop(given_up)
        return self._free.pop()

    def put(self, block: int, slot: int) -> None:
        """Note that the state at the block's end is in ``slot``, which was taken."""
        if block in self._slots:
            self.give_back(slot)
        else:
            self._slots[block] = slot

    def drop(self, block: int) -> None:
        """Forget the state at the end of a block, which may have none."""
        slot = self._slots.pop(block, None)
        if slot is not None:
            self.give_back(slot)

    def give_back(self, slot: int) -> None:
        """Give a slot back that was taken and not put to use."""
        self._free.append(slot)
