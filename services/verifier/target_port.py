"""What the decoding loop asks of a target. Both live in one process: tensors and distributions may pass.

The load-bearing rule: the loop hands over rows and gets choices. Logits stay where the target computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from speculation.types import Features, SamplingParams, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One request's part of a forward pass: ``chain`` tokens that follow its context, then a tree on the chain's end.

    Attributes:
        context: tokens whose keys and values the target already holds.
        tokens: the chain's tokens, then the nodes'.
        parents: one entry per node; -1 is the chain's last token.
        logits: how many of the last rows the target chooses after: none, or the chain's last one and all nodes.
        top_k: how many of the likeliest ids after each of these rows are wanted.
        distributions: whether distributions are wanted after these rows, in place of choices.
        layers: whose hidden states ``Target.features`` will be asked for, of any of these rows; as in ``Features``.
    """

    session_id: str
    context: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    logits: int
    top_k: int = 0
    distributions: bool = False
    layers: tuple[int, ...] = ()

    @property
    def chain(self) -> int:
        """Length of the chain."""
        return len(self.tokens) - len(self.parents)


NOT_CHOSEN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a request's tokens are chosen; ``prompt_length`` says where its answer begins."""

    params: SamplingParams
    prompt_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a pass brought for one request. Row 0 is the chain's last one, row i + 1 the tree's node i.

    Attributes:
        choices: the target's own token after each row; ``NOT_CHOSEN`` where its choices before lead elsewhere, where
            ``error`` says why there is none, and for all rows of a request that wants distributions.
        top_ids: the likeliest ids after each row, as many as were asked for, likeliest first.
        logprobs: log-probabilities of a token after a row, where the request's parameters ask for them.
        distribution: p after a row, [vocabulary], float64, with sum 1, where it was asked for.
        error: why a row that the choices lead to has none.

    Both functions may be called until the request's rows are kept.
    """

    choices: tuple[int, ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: Callable[[int, int], TokenLogprobs] | None = None
    distribution: Callable[[int], NDArray[np.float64]] | None = None
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """What a request begins with, and whose it is: requests of one tenant share what is computed of it; None: of nobody."""

    tokens: Sequence[int]
    tenant: str | None = None


class Target(Protocol):
    """The model and its key-value cache.

    Not thread-safe. What computes (``begin``, ``finish``, ``keep``, ``recover``) is called in one and the same thread: what
    a library does in parallel gets a team of threads for every thread that asks, and two teams on the same cores halve the
    speed. The rest computes nothing, and is called between them.
    """

    @property
    def depth(self) -> int:
        """How many passes should be under way at a time: one for each stage."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's own end-of-text tokens."""

    @property
    def choosing_s(self) -> float:
        """Seconds of the last ``finish`` that went into choosing."""

    def open(
        self, session_id: str, rows: int, prefix: Prefix | None = None, *, sampling: Sampling | None = None, spare: int = 0
    ) -> bool:
        """Make room for ``rows`` rows; False if there is none now, or not with ``spare`` rows left over for others.

        Without a prefix nothing is shared. Without ``sampling`` the likeliest token is chosen.
        """

    def computed(self, session_id: str) -> int:
        """How many of the session's tokens need not be computed any more."""

    def grow(self, session_id: str, rows: int) -> bool:
        """Make room for ``rows`` rows in all; False if there is none now."""

    def begin(self, batch: Sequence[Rows]) -> None:
        """Start a pass. A session has its rows in one pass at a time."""

    def finish(self) -> list[Outcome]:
        """End the oldest pass. Returns what it brought for each entry.

        Raises:
            TargetLost: nothing can be done before ``recover``.
        """

    def check_layers(self, layers: Sequence[int]) -> None:
        """Check that hidden states of these layers can be had; see ``Rows.layers``.

        Raises:
            InvalidArgument: of one they cannot; says which, and what is allowed.
        """

    def features(self, session_id: str, rows: Sequence[int]) -> Features:
        """Hidden states of ``Rows.layers``, side by side, in the session's pass just finished.

        Args:
            rows: indices into its tokens, of positions that follow each other: of its chain, then of an accepted path.
        """

    def keep(self, session_id: str, context: int, rows: Sequence[int]) -> None:
        """Of the session's pass, just finished, keep ``rows`` (indices into its tokens, ascending) behind ``context``."""

    def close(self, session_id: str) -> None:
        """Free what the session holds. Its rows are in no pass."""

    def forget(self, tenant: str) -> None:
        """Share nothing any more of what has been computed for a tenant."""

    def recover(self) -> None:
        """Build everything anew after ``TargetLost``, without any session."""

    def shutdown(self) -> None:
        """Let go of everything beyond this process."""
