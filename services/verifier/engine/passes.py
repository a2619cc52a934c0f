"""One forward pass: which rows each request contributes, and the verdicts on its trees."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import mul

from services.verifier.engine.deciding.asking import prices_of
from services.verifier.engine.deciding.named_share import NamedShare
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.singles import Singles
from services.verifier.engine.treed import Treed
from services.verifier.model.target_port import Rows, contexts_of
from services.verifier.model.tree_rows import sizes_of
from speculation.budget import Budget
from speculation.costs import Load
from speculation.records import maker
from speculation.sources import kind_of
from speculation.types import EMPTY_TREE, Features, TokenLogprobs, TokenTree, Verdict

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Part:
    """A request's part of one pass.

    Attributes:
        chain: how many of its rows are no nodes.
        verified: the chain reaches the pending token, so that the pass yields a new one.
        rows: set once its nodes are chosen, unless the pass is ``Treed``.
        drafted: the nodes at hand, of which ``tree`` holds those that the budget chose.
        ends: those of the tree's nodes, and ``ROOT``, that have streams.
        stream_rows: as in ``LoopStats``.
        verdict: None if the pass does not reach the end of the prompt, or failed.
        prompt_features: hidden states of the prompt's rows, where the plan asks for them.
        error: why its tree or its verification failed; None if neither did.
        scored: the log-probabilities of its rows' ``scored`` tokens.
        saved_s: seconds by which its tokens came sooner than by plain decoding of the same requests; may be negative.
    """

    request: LiveRequest
    chain: int
    verified: bool
    rows: Rows = field(init=False)
    tree: TokenTree = EMPTY_TREE
    drafted: TokenTree = EMPTY_TREE
    ends: tuple[int, ...] = ()
    stream_rows: float = 0.0
    verdict: Verdict | None = None
    prompt_features: Features | None = None
    error: Exception | None = None
    scored: tuple[TokenLogprobs, ...] = ()
    saved_s: float = 0.0


@dataclass(slots=True)
class PassWork:
    """What one pass does: for the requests that want one token each together, for the others one by one.

    Attributes:
        treed: the rows of ``parts``, where each is a pending token and a tree; None: not all are, and each has its own.
    """

    singles: Singles
    parts: list[Part]
    treed: Treed | None = None

    def __len__(self) -> int:
        """How many requests there are in it."""
        return self.singles.load.requests + len(self.parts)

    @property
    def requests(self) -> list[LiveRequest]:
        """All of them."""
        failed = [request for request, _ in self.singles.failed]
        return [*self.singles.requests, *failed, *[part.request for part in self.parts]]

    @property
    def rows(self) -> Sequence[Rows]:
        """What the target is to compute."""
        if not self.parts:
            return self.singles.rows
        return [*self.singles.rows, *self.part_rows] if len(self.singles) else self.part_rows

    @property
    def part_rows(self) -> Sequence[Rows]:
        """The rows of each part."""
        return [part.rows for part in self.parts] if self.treed is None else self.treed.rows


_NOTHING = Load(rows=0, requests=0, keys=0)
# The kind of source whose probes are rows of noise.
_NOISE = "uno"
_make_part, _make_rows = maker(Part), maker(Rows)
Failed = tuple[LiveRequest, Exception]


def plan_parts(
    requests: Sequence[LiveRequest],
    budget: Budget,
    prompt_rows: int,
    everybody: Iterable[LiveRequest],
    *,
    beside: Load = _NOTHING,
    quiet: bool = False,
    named: NamedShare | None = None,
) -> tuple[list[Part], Treed | None, list[Failed]]:
    """Choose the rows of every request for the coming pass. Returns the parts, and the requests whose tree failed.

    In between: the rows of the parts, where each is a pending token and a tree.

    Args:
        prompt_rows: most prompt rows over all requests; a request that gets none is left for the next pass.
        everybody: all requests, in this pass or another one: those that decode are slowed down by its prompt rows.
        beside: of the requests in the pass that have no parts.
        quiet: no drafts are checked, and nothing is read for drafters but hidden states; requests by their paper's rule are
            excepted.
        named: what these may cost the others; None: anything.
    """
    parts = _chains(requests, budget, prompt_rows, everybody)
    failed: list[Failed] = []
    drafted = [part for part in parts if part.request.by_paper] if quiet else parts
    if any(not part.request.plain for part in drafted):
        named = named if named_parts(parts) < len(parts) + beside.requests else None
        failed = _choose_nodes(parts, drafted, budget, named, beside, quiet=quiet)
        parts = [part for part in parts if part.error is None]
    if parts and all(map(_has_one_tree, parts)):
        return parts, Treed([part.request for part in parts], [part.tree for part in parts], quiet=quiet), failed
    for part in parts:
        part.rows = _rows(part, quiet and not part.request.by_paper)
    return parts, None, failed


def _has_one_tree(part: Part) -> bool:
    """Whether a part's rows are a pending token and a tree below it, of which only tokens and likely ids are asked."""
    return part.chain == 1 and part.verified and part.request.ordinary and not part.tree.probes


def _chains(requests: Sequence[LiveRequest], budget: Budget, most: int, everybody: Iterable[LiveRequest]) -> list[Part]:
    """How many tokens of each request the pass computes; those of prompts are at most ``most`` in all."""
    left = given = [len(request.tokens) - request.computed for request in requests]
    if prompts := [request.computed for request, rows in zip(requests, left, strict=True) if rows > 1]:
        given = shared_rows(left, budget.prompt_rows(decoding_load(everybody), most, max(prompts)))
    parts: list[Part] = []
    for request, rows, chain in zip(requests, left, given, strict=True):
        if chain:
            parts.append(_make_part(request=request, chain=chain, verified=chain == rows))
    return parts


def shared_rows(left: Sequence[int], most: int) -> list[int]:
    """The rows that each request gets of a pass with prompts: a single one that is left, and ``most`` of prompts in all.

    The prompt admitted first gets half of them, the others what is left in the order of their length: a short one does not
    wait behind long ones, and the first takes at most twice as long as alone, whatever comes.

    Args:
        left: tokens of each request that are not computed yet.

    >>> shared_rows([1, 1300, 40, 700], 256)
    [1, 128, 40, 88]
    >>> shared_rows([1, 1300, 1300], 256)
    [1, 256, 0]
    """
    prompts = [at for at, rows in enumerate(left) if rows > 1]
    given = [rows if rows <= 1 else 0 for rows in left]
    if prompts:
        first = prompts[0]
        given[first] = min(left[first], -(-most // 2))
        most -= given[first]
    for at in sorted(prompts, key=lambda each: left[each] - given[each]):
        more = min(left[at] - given[at], most)
        given[at] += more
        most -= more
    return given


def _choose_nodes(
    parts: Sequence[Part],
    drafted: Sequence[Part],
    budget: Budget,
    named: NamedShare | None,
    beside: Load,
    *,
    quiet: bool,
) -> list[Failed]:
    """Choose the nodes of those ``drafted`` parts that yield a token, and which of their rows have streams.

    Returns those that failed.
    """
    yielding, probabilities = [part for part in drafted if part.verified], budget.probabilities
    failed: list[Failed] = []
    for part in yielding:
        if not part.request.plain:
            try:
                part.drafted = part.request.take_tree(probabilities)
            except Exception as error:
                part.error = error
                failed.append((part.request, error))
    yielding = [part for part in yielding if part.error is None]
    load = _load([part.request.computed for part in parts], [part.chain for part in parts]).together(beside)
    # Without trees of their own, they yield tokens as the drafted ones do.
    plain = _NOTHING if quiet else beside
    decoding = _load([part.request.computed for part in yielding], [1] * len(yielding)).together(plain)
    for part, tree in zip(yielding, _choose(yielding, plain.requests, budget, load, decoding, named), strict=True):
        if part.drafted is not EMPTY_TREE:
            part.tree = tree
            part.request.note_choice(len(part.drafted.tokens), len(tree.tokens))
    _choose_ends(
        [part for part in yielding if not (part.request.plain or part.request.ordinary) and part.request.streams],
        budget,
        decoding,
    )
    return failed


def _choose(
    parts: Sequence[Part], plain: int, budget: Budget, load: Load, decoding: Load, named: NamedShare | None
) -> list[TokenTree]:
    """The nodes of each part's tree; ``plain`` requests have none."""
    try:
        whole = _whole(parts, budget, load, named)
        if True not in whole:
            return budget.choose([*[part.drafted for part in parts], *[EMPTY_TREE] * plain], load, decoding)[: len(parts)]
        trees = [EMPTY_TREE if kept else part.drafted for part, kept in zip(parts, whole, strict=True)]
        rows = sum([len(part.drafted) for part, kept in zip(parts, whole, strict=True) if kept])
        found = budget.choose([*trees, *[EMPTY_TREE] * plain], load.plus(rows), decoding.plus(rows))
        return [part.drafted if kept else tree for part, kept, tree in zip(parts, whole, found[: len(parts)], strict=True)]
    except Exception:
        log.exception("choosing nodes failed; this pass checks no drafts")
        return [EMPTY_TREE] * len(parts)


def _whole(parts: Sequence[Part], budget: Budget, load: Load, named: NamedShare | None) -> list[bool]:
    """Whose trees are checked whole: those of requests by their paper's rule, if ``named`` can pay for them."""
    whole = [part.request.by_paper for part in parts]
    rows = sum([len(part.drafted.tokens) for part in compress(parts, whole)])
    if not rows or named is None:
        return whole
    cost_s = budget.seconds(load.plus(rows)) - budget.seconds(load)
    if cost_s > named.left_s:
        for part, kept in zip(parts, whole, strict=True):
            if kept and part.drafted.tokens:
                part.request.switches.without_all(part.request.generated, "share")
        return [False] * len(parts)
    # There is no cost where time does not count.
    named.spend(0.0 if math.isnan(cost_s) else cost_s)
    return whole


def _choose_ends(streaming: Sequence[Part], budget: Budget, decoding: Load) -> None:
    """Which rows have streams. Errors cost speed, and nothing else."""
    if not streaming:
        return
    try:
        prices = prices_of(decoding, budget)
        for part in streaming:
            part.ends = part.request.take_ends(part.tree, budget, None if part.request.by_paper else prices)
    except Exception:
        log.exception("choosing rows for streams failed; this pass has no streams")
        for part in streaming:
            part.ends = ()


def _rows(part: Part, quiet: bool) -> Rows:
    """What the target is to compute for a part whose tree is chosen."""
    request, tree, chain, verified = part.request, part.tree, part.chain, part.verified
    computed = request.computed
    end = computed + chain
    if request.plain and not request.scores.wanted:
        tokens = (request.tokens[computed],) if chain == 1 else tuple(request.tokens[computed:end])
        return _make_rows(request_id=request.id, context=computed, tokens=tokens, logits=int(verified))
    if request.ordinary and not tree.probes:
        return _make_rows(
            request_id=request.id,
            context=computed,
            tokens=(*request.tokens[computed:end], *tree.tokens),
            parents=tree.parents,
            logits=1 + len(tree.tokens) if verified else 0,
            top_k=0 if quiet else request.observes.top_k,
        )
    wants, ends, streams = request.observes, part.ends, request.streams
    if streams is not None:
        part.stream_rows = len(ends) * streams.rows * streams.share
    return _make_rows(
        request_id=request.id,
        context=computed,
        tokens=(*request.tokens[computed:end], *tree.tokens),
        parents=tree.parents,
        logits=1 + len(tree.tokens) if verified else 0,
        top_k=0 if quiet else wants.top_k,
        tried=tree if request.message.plan.acceptance == "rejection" else None,
        layers=wants.layers if verified or wants.prompt else (),
        ends=tuple([chain + each for each in ends]) if ends else (),
        scored=request.scores.of_pass(request.tokens, computed, end, verified=verified) if request.scores.wanted else (),
        noise=_noise(tree, chain) if tree.probes else (),
    )


def _noise(tree: TokenTree, chain: int) -> tuple[int, ...]:
    """The rows that are noise, of a tree below a chain of so many rows."""
    return tuple([chain + node for node in sorted(tree.probes) if kind_of(tree.sources[node]) == _NOISE])


def decoding_load(requests: Iterable[LiveRequest]) -> Load:
    """The load of the requests with only the pending token left to compute, without drafts."""
    keys = [request.computed for request in requests if len(request.tokens) - request.computed == 1]
    return _load(keys, [1] * len(keys))


def load_to_come(requests: Iterable[LiveRequest]) -> Load:
    """The load once all these requests decode, without drafts."""
    keys = [len(request.tokens) for request in requests]
    return _load(keys, [1] * len(keys))


def _load(contexts: Sequence[int], rows: Sequence[int]) -> Load:
    """The load of requests with so many committed tokens before their rows."""
    row_keys = sum(map(mul, contexts, rows))
    return Load(rows=sum(rows), requests=len(rows), keys=sum(contexts), row_keys=row_keys)


def named_parts(parts: Sequence[Part]) -> int:
    """How many parts are of requests by their paper's rule."""
    return sum([part.request.by_paper for part in parts])


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSize:
    """What a pass holds.

    Attributes:
        parts: how many requests; ``named``: those by their paper's rule.
        rows: of tokens and nodes; ``stream_rows``, ``observed_rows``: as in ``LoopStats``.
        prompts: it computes rows of prompts before their last one.
        load: nodes and streams included.
    """

    parts: int
    named: int
    rows: int
    stream_rows: float
    observed_rows: int
    prompts: bool
    load: Load


def size_of(work: PassWork) -> PassSize:
    """The size of a pass, whose rows are set."""
    parts, own = work.parts, work.part_rows
    rows = sizes_of(own)
    load = _load(contexts_of(own), rows).together(work.singles.load)
    if work.treed is not None:
        return PassSize(parts=len(work), named=0, rows=load.rows, stream_rows=0.0, observed_rows=0, prompts=False, load=load)
    streams = sum([part.stream_rows for part in parts])
    return PassSize(
        parts=len(work),
        named=named_parts(parts),
        rows=load.rows,
        stream_rows=streams,
        observed_rows=sum([len(each.tokens) for each in own if each.layers]),
        prompts=max([part.chain for part in parts], default=0) > 1,
        load=replace(load, rows=load.rows + round(streams)) if streams else load,
    )
