"""Who owns each block of the KV cache, and which blocks hold a prefix that several requests can share.

A block that is full of committed tokens is *sealed* under a hash of its tenant and of all tokens up to its end. A request
of the same tenant that begins with the same tokens shares the block. Sealed blocks that no request uses keep their content
until the room is needed. The one idle for longest is evicted first, and of one text the end before the beginning.

A model whose layers have states shares a prefix up to the last border at which its state is kept (``kept_states``).
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.verifier.kv_cache.kept_states import KeptStates
from services.verifier.kv_cache.pool import BLOCK


@dataclass(kw_only=True, slots=True)
class _Owner:
    """A request's blocks.

    ``digests``: of its sealed blocks, shared ones included; None: its blocks are never shared. ``root``: the digest of its
    tenant; ``start``: what its blocks' digests are chained to. ``stepped``: how many of its tokens its state has seen.
    ``saved``: slots of its states after so many tokens, at the ends of blocks that are not sealed yet.
    """

    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] | None = None
    root: bytes = b""
    start: bytes = b""
    stepped: int = 0
    saved: dict[int, int] = field(default_factory=dict)


class BlockAllocator:
    """Hands out ``total`` blocks; computes nothing and touches no tensor.

    Args:
        states: kept ones of a model whose layers have states; None: no layer has.
    """

    def __init__(self, total: int, states: KeptStates | None = None) -> None:
        self.total = total
        self._states = states
        self._free = list(range(total))
        self._owners: dict[str, _Owner] = {}
        self._users: dict[int, int] = {}
        self._sealed: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # The tenant of each sealed block, as ``_root``.
        self._root_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of blocks that no request uses."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Number of available blocks that hold a prefix that may be shared again."""
        return len(self._idle)

    @property
    def owners(self) -> int:
        """Number of owners that are open."""
        return len(self._owners)

    def blocks_of(self, owner: str) -> list[int]:
        """``owner``'s blocks, in the order of its positions."""
        return self._owners[owner].blocks

    def open(
        self,
        owner: str,
        rows: int,
        tokens: Sequence[int] = (),
        tenant: str | None = None,
        spare: int = 0,
        salt: str = "",
        adapter: str = "",
    ) -> int | None:
        """Give ``owner`` room for ``rows`` rows.

        Args:
            tokens: what it begins with. The last one is never shared, since its logits must be computed.
            tenant: whose requests may share with it; None: nothing is shared.
            spare: blocks that must be left over.
            salt: only requests with the same one share.
            adapter: hex digest of the adapter that they are computed with, likewise; empty: none.

        Returns:
            How many of its blocks already hold its tokens; None if there is not enough room, and then nothing has changed.

        Raises:
            ValueError: ``owner`` is open already.
        """
        if owner in self._owners:
            raise ValueError(f"{owner} holds rows already")
        made = _Owner()
        if tenant is not None:
            made.root = _root(tenant)
            made.start = hashlib.sha256(made.root + salt.encode()).digest() if salt else made.root
            if adapter:
                # No salt's text has this byte.
                made.start = hashlib.sha256(made.start + b"\xff" + bytes.fromhex(adapter)).digest()
            made.digests = []
            for digest in _digests(made.start, tokens[: max(0, len(tokens) - 1)]):
                if digest not in self._sealed:
                    break
                made.digests.append(digest)
            made.blocks = [self._sealed[digest] for digest in made.digests]
            if self._states is not None:
                reach = self._states.reach(made.blocks)
                del made.digests[reach:], made.blocks[reach:]
        shared = len(made.blocks)
        made.stepped = shared * BLOCK
        # Idle blocks that it shares are no longer available to others, either.
        taken = sum(block in self._idle for block in made.blocks) + max(0, -(-rows // BLOCK) - shared)
        if taken + spare > self.available:
            return None
        for block in made.blocks:
            self._use(block)
        self._owners[owner] = made
        self.grow(owner, rows)
        return shared

    def grow(self, owner: str, rows: int) -> list[int] | None:
        """Give ``owner`` room for ``rows`` rows in all. Returns the blocks added; None if there are not enough."""
        blocks = self._owners[owner].blocks
        count = -(-rows // BLOCK) - len(blocks)
        if count <= 0:
            return []
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        taken = self._take_run(count)
        for block in taken:
            self._use(block)
        blocks += taken
        return taken

    def seal(self, owner: str, tokens: Sequence[int]) -> None:
        """Note that ``tokens`` are committed and computed: other requests may now share the blocks that they fill."""
        own = self._owners[owner]
        if own.digests is None:
            return
        if len(tokens) >= BLOCK * (len(own.digests) + 1):
            self._seal_blocks(own, own.digests, tokens)
        if own.saved:
            self._seal_states(own, own.digests)

    def _seal_blocks(self, own: _Owner, digests: list[bytes], tokens: Sequence[int]) -> None:
        done = len(digests)
        last = digests[-1] if digests else own.start
        for number, digest in enumerate(_digests(last, tokens[done * BLOCK :]), done):
            digests.append(digest)
            block = own.blocks[number]
            # If another request has sealed the same text first, this block stays private.
            if digest not in self._sealed:
                self._sealed[digest] = block
                self._digest_of[block] = digest
                self._root_of[block] = own.root

    def _seal_states(self, own: _Owner, digests: list[bytes]) -> None:
        assert self._states is not None
        for length in [length for length in own.saved if length <= BLOCK * len(digests)]:
            slot, block = own.saved.pop(length), self._sealed.get(digests[length // BLOCK - 1])
            if block is None:
                # It was another request's, which is gone.
                self._states.give_back(slot)
            else:
                self._states.put(block, slot)

    def state_at_start(self, owner: str) -> int | None:
        """The slot of the kept state that ``owner``, just opened, begins from; None: it shares no block, or needs none."""
        own = self._owners[owner]
        if self._states is None or not own.stepped:
            return None
        return self._states.slot_of(own.blocks[own.stepped // BLOCK - 1])

    def save_states(self, owner: str, length: int) -> list[tuple[int, int]]:
        """Say which states to keep in the pass after which the state of ``owner`` has seen ``length`` tokens.

        Returns:
            After how many tokens, and in which slots.
        """
        own = self._owners[owner]
        if self._states is None or own.digests is None:
            return []
        made = []
        for border in self._states.borders(own.stepped, length):
            if not self._has_state(own.digests, border) and (slot := self._states.take(self._idle)) is not None:
                own.saved[border] = slot
                made.append((border, slot))
        own.stepped = length
        return made

    def _has_state(self, digests: list[bytes], length: int) -> bool:
        """Whether the state after so many tokens is kept, as far as they are sealed."""
        assert self._states is not None
        number = length // BLOCK
        block = self._sealed.get(digests[number - 1]) if number <= len(digests) else None
        return block is not None and self._states.slot_of(block) is not None

    def release(self, owner: str) -> None:
        """Take back the blocks of ``owner``, which may have none."""
        own = self._owners.pop(owner, None)
        for slot in own.saved.values() if own else ():
            assert self._states is not None
            self._states.give_back(slot)
        for block in reversed(own.blocks if own else []):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._digest_of:
                self._idle[block] = None
            else:
                insort(self._free, block)

    def forget(self, tenant: str) -> None:
        """Stop sharing the blocks of ``tenant``'s requests, live ones included."""
        self._forget({_root(tenant)})

    def forget_all(self) -> None:
        """Stop sharing all blocks: what they hold was computed by other weights."""
        self._forget({*self._root_of.values(), *(owner.root for owner in self._owners.values())})

    def _forget(self, roots: set[bytes]) -> None:
        for owner in self._owners.values():
            if owner.root in roots:
                owner.digests = None
        for block in [block for block, whose in self._root_of.items() if whose in roots]:
            self._unseal(block)
            if block in self._idle:
                del self._idle[block]
                insort(self._free, block)

    def _use(self, block: int) -> None:
        self._users[block] = self._users.get(block, 0) + 1
        self._idle.pop(block, None)

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        self._unseal(block)
        insort(self._free, block)

    def _unseal(self, block: int) -> None:
        del self._sealed[self._digest_of.pop(block)], self._root_of[block]
        if self._states is not None:
            self._states.drop(block)

    def _take_run(self, count: int) -> list[int]:
        """``count`` free blocks: the first run of neighbours, or the lowest ones if there is none."""
        free = self._free
        start = next((i for i in range(len(free) - count + 1) if free[i + count - 1] - free[i] == count - 1), 0)
        taken = free[start : start + count]
        del free[start : start + count]
        return taken


def _root(tenant: str) -> bytes:
    """The digest that those of a tenant's blocks are chained to."""
    return hashlib.sha256(b"tenant " + tenant.encode()).digest()


def _digests(before: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """For every full block of ``tokens``, the hash of it and of everything before it."""
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        content = np.asarray(tokens[start : start + BLOCK], dtype=np.int64).tobytes()
        before = hashlib.sha256(before + content).digest()
        yield before
