"""The port between the decoding loop and its target. Both are in one process, so tensors and distributions may pass.

The loop hands over rows and gets choices. Logits stay where the target computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from speculation.records import maker, quickly_made
from speculation.types import Features, SamplingParams, TokenLogprobs, TokenTree


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One request's part of a forward pass: ``chain`` tokens that follow its context, then a tree below the last of them.

    Attributes:
        context: number of tokens whose keys and values the target already holds.
        tokens: the chain's tokens, then the nodes'.
        parents: one entry per node; -1 is the chain's last token.
        logits: number of last rows after which the target chooses: 0, or the chain's last row and all nodes.
        top_k: how many of the likeliest ids are wanted after each of these rows.
        tried: where the rejection rule applies, the tree that these rows hold: instead of choices, distributions are wanted
            after them, and what becomes of its nodes.
        layers: layers whose hidden states ``Target.features`` may be asked for, for any row; numbered as in ``Features``.
        ends: those of the last ``logits`` rows, as indices into ``tokens``, that have streams in this pass.
        scored: tokens of the prompt whose log-probabilities are wanted: those that follow the rows right before the last
            ``logits`` ones.
        noise: those of the nodes, as ascending indices into ``tokens``, that are noise to draft by: they have the adapter
            for that, and no other.
    """

    request_id: str
    context: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    logits: int
    top_k: int = 0
    tried: TokenTree | None = None
    layers: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    scored: tuple[int, ...] = ()
    noise: tuple[int, ...] = ()

    @property
    def chain(self) -> int:
        """Length of the chain."""
        return len(self.tokens) - len(self.parents)

    @property
    def read(self) -> int:
        """Number of last rows whose logits are read: those that are scored, and those after which the target chooses."""
        return self.logits + len(self.scored)


_make_rows = maker(Rows)


class ColumnRows(Sequence[Rows]):
    """Entries of a pass by columns. A ``Rows`` is made for each where they are read one by one.

    Attributes:
        request_ids, contexts: of each entry.
        tokens: of all rows, entry after entry; after each of them the target chooses.
    """

    __slots__ = ("_made", "contexts", "request_ids", "tokens")

    def __init__(self, request_ids: list[str], contexts: list[int], tokens: list[int]) -> None:
        self.request_ids, self.contexts, self.tokens = request_ids, contexts, tokens
        self._made: list[Rows] | None = None

    @override
    def __len__(self) -> int:
        return len(self.request_ids)

    @overload
    def __getitem__(self, at: int) -> Rows: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Rows]: ...

    @override
    def __getitem__(self, at: int | slice) -> Rows | Sequence[Rows]:
        return self._all()[at]

    @override
    def __iter__(self) -> Iterator[Rows]:
        return iter(self._all())

    def _all(self) -> list[Rows]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> list[Rows]:
        """Each entry by itself."""
        raise NotImplementedError


class SingleRows(ColumnRows):
    """Entries with one token each, after which the target chooses, and nothing else.

    >>> rows = SingleRows(["a", "b"], [3, 8], [5, 6])
    >>> rows[1] == Rows(request_id="b", context=8, tokens=(6,), logits=1)
    True
    """

    __slots__ = ()

    @override
    def _make(self) -> list[Rows]:
        return [
            _make_rows(request_id=request_id, context=context, tokens=(token,), logits=1)
            for request_id, context, token in zip(self.request_ids, self.contexts, self.tokens, strict=True)
        ]


def ids_of(batch: Sequence[Rows]) -> list[str]:
    """The requests of a pass's entries."""
    return batch.request_ids if isinstance(batch, ColumnRows) else [rows.request_id for rows in batch]


def contexts_of(batch: Sequence[Rows]) -> list[int]:
    """The contexts of a pass's entries."""
    return batch.contexts if isinstance(batch, ColumnRows) else [rows.context for rows in batch]


def tokens_of(batch: Sequence[Rows]) -> list[int]:
    """The tokens of all rows of a pass."""
    return batch.tokens if isinstance(batch, ColumnRows) else [*chain.from_iterable([rows.tokens for rows in batch])]


def rows_read(batch: Sequence[Rows]) -> list[int]:
    """Indices of a pass's rows whose logits are read."""
    if isinstance(batch, ColumnRows):
        return list(range(len(batch.tokens)))
    ends = accumulate(len(rows.tokens) for rows in batch)
    return [row for rows, end in zip(batch, ends, strict=True) for row in range(end - rows.read, end)]


def reads_all(batch: Sequence[Rows]) -> bool:
    """Whether the logits of each of a pass's rows are read, and nothing else is told of any."""
    return isinstance(batch, ColumnRows) or all(rows.logits == len(rows.tokens) for rows in batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSpec:
    """The streams that a row may have in a pass.

    Attributes:
        rows: stream rows of one row.
        share: of the model's layers that each stream row goes through.
        most_rows: most nodes and stream rows of one request in a pass.
        two_steps: whether their first states are observed as well. A drafter can then compute streams that a pass left out.
    """

    rows: int
    share: float
    most_rows: int
    two_steps: bool = False


NOT_CHOSEN = -1

# Which tokens are allowed, [at least vocabulary / 8 bytes]: bit ``token % 8`` of byte ``token // 8``.
PackedBits = NDArray[np.uint8]


class TokenRule(Protocol):
    """Which tokens a request's answer may go on with. Used by one thread at a time."""

    def allowed(self, path: Sequence[int]) -> PackedBits | None:
        """The tokens allowed after the request's committed tokens and ``path``: a function of these alone.

        None: ``path`` is not allowed itself, or ends the answer, so that nothing is chosen after it.

        Raises:
            OutriderError: no token is allowed, or it cannot be told.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a request's tokens are chosen.

    ``prompt_length`` says where its answer begins. ``rule`` bars tokens; the request's owner tells it what is committed.
    """

    params: SamplingParams
    prompt_length: int
    rule: TokenRule | None = None


class Tried(NamedTuple):
    """What ``speculation.rejection.DraftTrial`` says of a row, as far as rounding cannot change it.

    Attributes:
        coins: whether each child is accepted, where those before it were rejected; None: ask the rule.
        drawn: the token drawn where all are rejected; ``NOT_CHOSEN``: ask the rule.
    """

    coins: tuple[bool | None, ...]
    drawn: int


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a pass for one request. Row 0 is the chain's last one, row i + 1 the tree's node i.

    Attributes:
        choices: the target's own token after each row. ``NOT_CHOSEN`` after rows that earlier choices do not lead to, after
            rows that failed (see ``error``), and after all rows of a request under the rejection rule.
        top_ids: the likeliest ids after each row, as many as were asked for, likeliest first.
        chances: how likely each of these is after a row of noise; nothing after another row. Empty: there is no noise.
        logprobs: gives the log-probability of a token after a row; None unless the request's parameters ask for it.
        distribution: gives p after a row, [vocabulary], float64, with sum 1; None unless the rejection rule applies.
        tried: under that rule, what was found of it after each row without a distribution; empty: nothing.
        error: why the choice failed after a row that the earlier choices lead to.
        scored: the log-probabilities of ``Rows.scored``.

    Both functions may be called until the request's rows are kept.
    """

    choices: tuple[int, ...] = ()
    top_ids: Sequence[tuple[int, ...]] = ()
    chances: tuple[tuple[float, ...], ...] = ()
    logprobs: Callable[[int, int], TokenLogprobs] | None = None
    distribution: Callable[[int], NDArray[np.float64]] | None = None
    tried: tuple[Tried, ...] = ()
    error: Exception | None = None
    scored: tuple[TokenLogprobs, ...] = ()


_make_outcome = maker(Outcome)


class SingleOutcomes(Sequence[Outcome]):
    """Those of ``SingleRows`` where a token was chosen after each, and nothing else is told."""

    __slots__ = ("choices",)

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices

    @override
    def __len__(self) -> int:
        return len(self.choices)

    @overload
    def __getitem__(self, at: int) -> Outcome: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Outcome]: ...

    @override
    def __getitem__(self, at: int | slice) -> Outcome | Sequence[Outcome]:
        if isinstance(at, slice):
            return SingleOutcomes(self.choices[at])
        return _make_outcome(choices=(self.choices[at],))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The tokens that a request begins with.

    Requests of one ``tenant`` with the same ``salt`` share their KV cache; None: nothing is shared. ``adapter``: the name of
    the one that they are computed with, whose KV cache is its own; empty: none.
    """

    tokens: Sequence[int]
    tenant: str | None = None
    salt: str = ""
    adapter: str = ""


class Target(Protocol):
    """The model and its KV cache.

    Not thread-safe. The methods that compute (``begin``, ``finish``, ``keep``, ``recover``), and ``beat``, must be called
    in one thread: parallel libraries start a team of threads for every thread that calls them, and two teams on the same
    cores halve the speed. The other methods compute nothing and are called between them.
    """

    @property
    def depth(self) -> int:
        """How many passes should be under way at a time: one for each pipeline stage."""

    @property
    def processes(self) -> int:
        """How many processes compute it, this one included."""

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
        self, request_id: str, rows: int, prefix: Prefix | None = None, *, sampling: Sampling | None = None, spare: int = 0
    ) -> bool:
        """Make room for ``rows`` rows; False if there is not enough now to leave ``spare`` rows for others.

        Without a prefix nothing is shared. Without ``sampling`` the likeliest token is chosen.
        """

    def computed(self, request_id: str) -> int:
        """How many of the request's first tokens the KV cache already holds; 0 if it shares nothing."""

    def grow(self, request_id: str, rows: int) -> int:
        """Make room for ``rows`` rows in all. Returns for how many there is room then; 0 if there is none now."""

    def begin(self, batch: Sequence[Rows]) -> None:
        """Start a pass. A request may be in one pass at a time."""

    def finish(self) -> Sequence[Outcome]:
        """End the oldest pass. Returns the result of each entry.

        Raises:
            TargetLost: nothing can be done before ``recover``.
        """

    def check_layers(self, layers: Sequence[int]) -> None:
        """Check that hidden states of these layers are available; see ``Rows.layers``.

        Raises:
            InvalidArgument: those of a layer are not; names it and what is allowed.
        """

    def streams(self, layers: Sequence[int]) -> StreamSpec | None:
        """The streams among ``Rows.layers``; None: there are none among them."""

    def fetch_features(self, asked: Mapping[str, Sequence[int]]) -> None:
        """Say, by request, for which rows of the pass just finished ``features`` will be called: one wait for them all."""

    def features(self, request_id: str, rows: Sequence[int]) -> Features:
        """Hidden states of ``Rows.layers``, concatenated, from the request's pass just finished.

        Args:
            rows: indices into the request's tokens in that pass, at consecutive positions: in its chain, then along an
                accepted path.
        """

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None:
        """Commit ``rows`` of the request's pass just finished (ascending indices into its tokens) after ``context``."""

    def keep_singles(self, batch: SingleRows) -> None:
        """As ``keep`` of each entry's one row."""

    def keep_paths(self, batch: ColumnRows, paths: Sequence[Sequence[int]]) -> None:
        """As ``keep`` of each entry's first row, its pending token, and of the nodes of its path."""

    def close(self, request_id: str) -> None:
        """Free what the request holds. It must not be in a pass."""

    def forget(self, tenant: str) -> None:
        """Stop sharing what has been computed for a tenant."""

    def beat(self) -> None:
        """Make sure that all of its processes answer; called while no pass is under way.

        Raises:
            TargetLost: one does not.
        """

    def recover(self) -> None:
        """Rebuild the target after ``TargetLost``, without any request."""

    def shutdown(self) -> None:
        """Release everything outside this process."""
