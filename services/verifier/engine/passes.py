"""One forward pass: which rows each request contributes, and the verdicts on its trees."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from services.verifier.engine.deciding.asking import prices_of
from services.verifier.engine.deciding.named_share import NamedShare
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.stats import StepTimes
from services.verifier.engine.verify import verify, with_features
from services.verifier.model.target_port import Outcome, Rows, Target
from speculation.budget import Budget
from speculation.costs import Load
from speculation.types import EMPTY_TREE, Features, TokenLogprobs, TokenTree, Verdict

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Part:
    """A request's part of one pass.

    Attributes:
        chain: how many of its rows are no nodes.
        drafted: the nodes at hand, of which ``tree`` holds those that the budget chose.
        stream_rows: as in ``LoopStats``.
        verdict: None if the pass does not reach the end of the prompt, or failed.
        prompt_features: hidden states of the prompt's rows, where the plan asks for them.
        error: why verification failed; None if it did not.
        scored: the log-probabilities of its rows' ``scored`` tokens.
        saved_s: seconds by which its tokens came sooner than by plain decoding of the same requests; may be negative.
    """

    request: LiveRequest
    rows: Rows
    chain: int
    tree: TokenTree = EMPTY_TREE
    drafted: TokenTree = EMPTY_TREE
    stream_rows: float = 0.0
    verdict: Verdict | None = None
    prompt_features: Features | None = None
    error: Exception | None = None
    scored: tuple[TokenLogprobs, ...] = ()
    saved_s: float = 0.0


Failed = tuple[LiveRequest, Exception]


def plan_parts(
    requests: Iterable[LiveRequest],
    budget: Budget,
    prompt_rows: int,
    everybody: Load,
    *,
    quiet: bool = False,
    named: NamedShare | None = None,
) -> tuple[list[Part], list[Failed]]:
    """Choose the rows of every request for the coming pass. Returns the parts, and the requests whose tree failed.

    Args:
        prompt_rows: most prompt rows over all requests; a request that gets none is left for the next pass.
        everybody: the load of all decoding requests, in this pass or another one: all are slowed down by its prompt rows.
        quiet: no drafts are checked, and nothing is read for drafters but hidden states; requests by their paper's rule are
            excepted.
        named: what these may cost the others; None: anything.
    """
    requests = list(requests)
    farthest = max((request.computed for request in requests if len(request.tokens) - request.computed > 1), default=0)
    chains = _chains(requests, budget.prompt_rows(everybody, prompt_rows, farthest))
    contexts = [request.computed for request, _ in chains]
    load = Load(
        rows=sum([chain for _, chain in chains]),
        requests=len(chains),
        keys=sum(contexts),
        row_keys=sum([context * chain for context, (_, chain) in zip(contexts, chains, strict=True)]),
    )
    keys = [request.computed for request, chain in chains if _verified(request, chain)]
    decoding = Load(rows=len(keys), requests=len(keys), keys=sum(keys), row_keys=sum(keys))
    if quiet and not any(request.by_paper for request, _ in chains):
        return [_part(request, chain, EMPTY_TREE, (), EMPTY_TREE, top_k=0) for request, chain in chains], []
    drafted = [request for request, chain in chains if _verified(request, chain) and (request.by_paper or not quiet)]
    trees, failed = _trees(drafted, budget)
    chosen = _choose(trees, budget, load, decoding, named if any(not request.by_paper for request, _ in chains) else None)
    for request, tree in trees.items():
        if tree is not EMPTY_TREE:
            request.note_choice(len(tree), len(chosen[request]))
    ends = _ends(chosen, budget, decoding)
    lost = {request.id for request, _ in failed}
    parts = [
        _part(
            request,
            chain,
            chosen.get(request, EMPTY_TREE),
            ends.get(request.id, ()),
            trees.get(request, EMPTY_TREE),
            top_k=0 if quiet and not request.by_paper else None,
        )
        for request, chain in chains
        if request.id not in lost
    ]
    return parts, failed


def _chains(requests: Sequence[LiveRequest], prompt_rows: int) -> list[tuple[LiveRequest, int]]:
    """How many tokens of each request the pass computes; those of prompts are at most ``prompt_rows`` in all."""
    chains: list[tuple[LiveRequest, int]] = []
    for request in requests:
        chain = len(request.tokens) - request.computed
        if chain > 1:
            chain = min(chain, prompt_rows)
            prompt_rows -= chain
        if chain:
            chains.append((request, chain))
    return chains


def _trees(requests: Iterable[LiveRequest], budget: Budget) -> tuple[dict[LiveRequest, TokenTree], list[Failed]]:
    """Every request's tree. An error in one does not affect the others."""
    trees: dict[LiveRequest, TokenTree] = {}
    failed: list[Failed] = []
    for request in requests:
        try:
            trees[request] = request.take_tree(budget.probabilities)
        except Exception as error:
            failed.append((request, error))
    return trees, failed


def _choose(
    trees: Mapping[LiveRequest, TokenTree], budget: Budget, load: Load, decoding: Load, named: NamedShare | None
) -> dict[LiveRequest, TokenTree]:
    """The part of each tree that the pass checks.

    Args:
        named: pays for the trees of requests by their paper's rule, where others share the pass; None: they cost nobody
            anything.
    """
    try:
        whole = {request: tree for request, tree in trees.items() if request.by_paper and tree.tokens}
        rows = sum(map(len, whole.values()))
        if whole and named is not None:
            cost_s = budget.seconds(load.plus(rows)) - budget.seconds(load)
            if math.isfinite(cost_s) and cost_s > named.left_s:
                whole, rows = {}, 0
            else:
                named.spend(cost_s if math.isfinite(cost_s) else 0.0)
        rest = [EMPTY_TREE if request in whole else tree for request, tree in trees.items()]
        found = budget.choose(rest, load.plus(rows), decoding.plus(rows))
        return {request: whole.get(request, tree) for request, tree in zip(trees, found, strict=True)}
    except Exception:
        log.exception("choosing nodes failed; this pass checks no drafts")
        return dict.fromkeys(trees, EMPTY_TREE)


def _ends(trees: Mapping[LiveRequest, TokenTree], budget: Budget, decoding: Load) -> dict[str, tuple[int, ...]]:
    """Which rows of requests have streams, by request id. Errors cost speed, and nothing else."""
    streaming = {request: tree for request, tree in trees.items() if request.streams is not None}
    if not streaming:
        return {}
    try:
        prices = prices_of(decoding, budget)
        return {
            request.id: request.take_ends(tree, budget, None if request.by_paper else prices)
            for request, tree in streaming.items()
        }
    except Exception:
        log.exception("choosing rows for streams failed; this pass has no streams")
        return {}


def decoding_load(requests: Iterable[LiveRequest]) -> Load:
    """The load of the requests with only the pending token left to compute, without drafts."""
    keys = [request.computed for request in requests if len(request.tokens) - request.computed == 1]
    return Load(rows=len(keys), requests=len(keys), keys=sum(keys), row_keys=sum(keys))


def load_to_come(requests: Iterable[LiveRequest]) -> Load:
    """The load once all these requests decode, without drafts."""
    keys = [len(request.tokens) for request in requests]
    return Load(rows=len(keys), requests=len(keys), keys=sum(keys), row_keys=sum(keys))


def _verified(request: LiveRequest, chain: int) -> bool:
    """Whether a pass over ``chain`` rows reaches the pending token and so yields a new one."""
    return request.computed + chain == len(request.tokens)


def _part(
    request: LiveRequest, chain: int, tree: TokenTree, ends: tuple[int, ...], drafted: TokenTree, top_k: int | None = None
) -> Part:
    end, plan, streams = request.computed + chain, request.message.plan, request.streams
    wants, verified = request.observes, _verified(request, chain)
    tokens = tuple(request.tokens[request.computed : end])
    rows = Rows(
        request_id=request.id,
        context=request.computed,
        tokens=tokens + tree.tokens,
        parents=tree.parents,
        logits=1 + len(tree.tokens) if verified else 0,
        top_k=wants.top_k if top_k is None else top_k,
        tried=tree if plan.acceptance == "rejection" else None,
        layers=wants.layers if wants.prompt or verified else (),
        ends=tuple([chain + end for end in ends]) if ends else (),
        scored=request.scores.of_pass(request.tokens, request.computed, end, verified=verified),
    )
    stream_rows = 0.0 if streams is None else len(ends) * streams.rows * streams.share
    return Part(request=request, rows=rows, chain=chain, tree=tree, drafted=drafted, stream_rows=stream_rows)


def load_of(parts: Sequence[Part]) -> Load:
    """The load of a pass over ``parts``, tree nodes and streams included."""
    counts, contexts = [len(part.rows.tokens) for part in parts], [part.rows.context for part in parts]
    return Load(
        rows=sum(counts) + round(sum([part.stream_rows for part in parts])),
        requests=len(parts),
        keys=sum(contexts),
        row_keys=sum(map(mul, contexts, counts)),
    )


def named_parts(parts: Sequence[Part]) -> int:
    """How many parts are of requests by their paper's rule."""
    return sum(part.request.by_paper for part in parts)


def finish_pass(target: Target, parts: list[Part], times: StepTimes) -> None:
    """Finish the oldest pass and verify its trees. Runs in the target's thread; touches only the target and the parts.

    An error of one request is stored in its part; an error of the whole pass is raised.
    """
    with times.measure("forward"):
        outcomes = target.finish()
    times.move(target.choosing_s, "forward", "choose")
    with times.measure("choose"):
        kept = [_decided(part, outcome) for part, outcome in zip(parts, outcomes, strict=True)]
    observed = {
        part.request.id: rows[0 if part.request.observes.prompt else _first_chosen(part) :]
        for part, rows in zip(parts, kept, strict=True)
        if part.rows.layers and part.error is None
    }
    if observed:
        target.fetch_features(observed)
        for part, rows in zip(parts, kept, strict=True):
            if part.rows.layers and part.error is None:
                _observe(target, part, rows)
    with times.measure("keep"):
        for part, rows in zip(parts, kept, strict=True):
            if part.error is None:
                target.keep(part.request.id, part.rows.context, rows)


def _decided(part: Part, outcome: Outcome) -> list[int]:
    """Give a part its verdict, if its rows reach the end of the prompt. Returns the rows to keep."""
    rows = list(range(part.chain))
    part.scored = outcome.scored
    if part.rows.logits:
        try:
            part.verdict = verify(part.request, part.tree, outcome)
        except Exception as error:
            part.error = error
            return rows
        rows += [part.chain + node for node in part.verdict.accepted_path]
    return rows


def whole_pass(target: Target, parts: list[Part], times: StepTimes) -> None:
    """Begin a pass and finish it, see ``finish_pass``."""
    with times.measure("begin"):
        target.begin([part.rows for part in parts])
    finish_pass(target, parts, times)


def _observe(target: Target, part: Part, rows: Sequence[int]) -> None:
    """Take the hidden states of the kept rows: those that tokens were chosen from, and the prompt's rows before them."""
    chosen = _first_chosen(part)
    try:
        if part.request.observes.prompt and chosen:
            part.prompt_features = target.features(part.request.id, rows[:chosen])
        if part.verdict is not None:
            part.verdict = with_features(part.verdict, target.features(part.request.id, rows[chosen:]))
    except Exception as error:
        part.error = error


def _first_chosen(part: Part) -> int:
    """Number of the rows after which no token was chosen: the prompt's."""
    return part.chain - 1 if part.verdict is not None else part.chain
