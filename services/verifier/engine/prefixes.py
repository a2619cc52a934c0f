"""Which of a request's prefixes a draft may start from: those after its last few steps."""

from __future__ import annotations

from collections.abc import Sequence

from speculation.messages import Draft
from speculation.prefix import EMPTY_HASH, extend_hash

# One per step.
_REMEMBERED = 8


class Prefixes:
    """Hashes of a request's prefixes after its last few steps. A draft must start from one of these.

    Attributes:
        hash: of the whole committed prefix.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.hash = extend_hash(EMPTY_HASH, tokens)
        self._hashes = {len(tokens): self.hash}

    def commit(self, length: int, tokens: Sequence[int]) -> None:
        """Note that ``tokens`` were appended, which made the prefix ``length`` tokens long."""
        self.note(length, extend_hash(self.hash, tokens))

    def note(self, length: int, prefix_hash: int) -> None:
        """As ``commit``, with the hash that the prefix has got."""
        self.hash = prefix_hash
        # Drafts sent ahead start from one of the last few prefixes, never from much older ones.
        self._hashes[length] = prefix_hash
        if len(self._hashes) > _REMEMBERED:
            # Lengths grow, so the first is the oldest.
            del self._hashes[next(iter(self._hashes))]

    def known(self, draft: Draft) -> bool:
        """Whether a draft starts from a remembered prefix."""
        return self._hashes.get(draft.base_length) == draft.base_hash

    def since(self, draft: Draft, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """The tokens committed after the position where a draft's tree starts.

        Empty if the tree starts at the end of ``tokens``; None if it does not continue a prefix of ``tokens``.
        """
        end = draft.base_length + len(draft.assumed)
        if end > len(tokens) or not self.known(draft):
            return None
        if draft.assumed and tuple(tokens[draft.base_length : end]) != draft.assumed:
            return None
        return tuple(tokens[end:])
