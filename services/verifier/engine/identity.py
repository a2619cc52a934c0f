"""The identity of what a verifier computes with: its arithmetic and its tokenizer.

An answer that began with some weights never goes on with others, nor with another tokenizer's ids.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from speculation.errors import NotBegun
from speculation.messages import GenerationRequest


def with_adapter(arithmetic: str, digest: str) -> str:
    """The arithmetic of answers that are computed with an adapter of this digest."""
    return hashlib.sha256(f"{arithmetic} {digest}".encode()).hexdigest()[:16]


def check_begun(request: GenerationRequest, arithmetic: str) -> None:
    """Check that an answer goes on by the arithmetic that it was begun by.

    Raises:
        NotBegun: it was begun by another one.
    """
    if request.committed and request.arithmetic not in ("", arithmetic):
        raise NotBegun(
            f"the answer was begun by a verifier with other weights, dtype or kernels ({request.arithmetic}), "
            f"and this one ({arithmetic}) would not go on with the same tokens"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a verifier's tokens are chosen by.

    Attributes:
        arithmetic: see ``arithmetic_of``; answers are told it with their first tokens.
        tokenizer: the digest of its tokenizer; empty: not known.
    """

    arithmetic: str = ""
    tokenizer: str = ""

    def check(self, request: GenerationRequest) -> None:
        """Check that a verifier may answer, or go on with an answer.

        Raises:
            NotBegun: the answer was begun by another arithmetic, or the router's tokens are of another tokenizer.
        """
        if self.tokenizer and request.tokenizer not in ("", self.tokenizer):
            raise NotBegun(
                f"the router's model has another tokenizer ({request.tokenizer[:16]}) than this verifier's "
                f"({self.tokenizer[:16]}): their settings must name one model"
            )
        check_begun(request, self.arithmetic)


# Of targets whose answers nobody compares.
UNNAMED = Identity()
