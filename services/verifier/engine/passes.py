"""One forward pass: which rows each request contributes, and the verdicts on its trees."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.verifier.engine.deciding.asking import prices_of
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.stats import StepTimes
from services.verifier.engine.verify import verify, with_features
from services.verifier.model.target_port import Rows, Target
from speculation.budget import Budget
from speculation.costs import Load
from speculation.types import EMPTY_TREE, Features, TokenTree, Verdict

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Part:
    """A request's part of one pass.

    Attributes:
        stream_rows: as in ``LoopStats``.
        verdict: None if the pass does not reach the end of the prompt, or failed.
        prompt_features: hidden states of the prompt's rows, where the plan asks for them.
        error: why verification failed; None if it did not.
    """

    request: LiveRequest
    rows: Rows
    tree: TokenTree = EMPTY_TREE
    stream_rows: float = 0.0
    verdict: Verdict | None = None
    prompt_features: Features | None = None
    error: Exception | None = None


Failed = tuple[LiveRequest, Exception]


def plan_parts(
    requests: Iterable[LiveRequest], budget: Budget, prompt_rows: int, everybody: Load
) -> tuple[list[Part], list[Failed]]:
    """Choose the rows of every request for the coming pass. Returns the parts, and the requests whose tree failed.

    Args:
        prompt_rows: most prompt rows over all requests; a request that gets none is left for the next pass.
        everybody: the load of all decoding requests, in this pass or another one: all are slowed down by its prompt rows.
    """
    requests = list(requests)
    farthest = max((request.computed for request in requests if len(request.tokens) - request.computed > 1), default=0)
    prompt_rows = budget.prompt_rows(everybody, prompt_rows, farthest)
    chains: list[tuple[LiveRequest, int]] = []
    for request in requests:
        pending = len(request.tokens) - request.computed
        chain = min(pending, prompt_rows) if pending > 1 else 1
        if chain == 0:
            continue
        if pending > 1:
            prompt_rows -= chain
        chains.append((request, chain))
    load = Load(
        rows=sum(chain for _, chain in chains),
        requests=len(chains),
        keys=sum(request.computed for request, _ in chains),
        row_keys=sum(request.computed * chain for request, chain in chains),
    )
    verified = [request for request, chain in chains if _verified(request, chain)]
    keys = [request.computed for request in verified]
    decoding = Load(rows=len(keys), requests=len(keys), keys=sum(keys), row_keys=sum(keys))
    trees, failed = _trees(verified, budget)
    chosen = dict(zip(trees, _choose(list(trees.values()), budget, load, decoding), strict=True))
    for request in verified:
        if request.id in chosen:
            request.note_choice(len(trees[request.id]), len(chosen[request.id]))
    ends = _ends({request: chosen[request.id] for request in verified if request.id in chosen}, budget, decoding)
    lost = {request.id for request, _ in failed}
    parts = [
        _part(request, chain, chosen.get(request.id, EMPTY_TREE), ends.get(request.id, ()))
        for request, chain in chains
        if request.id not in lost
    ]
    return parts, failed


def _trees(requests: Iterable[LiveRequest], budget: Budget) -> tuple[dict[str, TokenTree], list[Failed]]:
    """Every request's tree, by request id. An error in one does not affect the others."""
    trees: dict[str, TokenTree] = {}
    failed: list[Failed] = []
    for request in requests:
        try:
            trees[request.id] = request.take_tree(budget.probabilities)
        except Exception as error:
            failed.append((request, error))
    return trees, failed


def _choose(trees: list[TokenTree], budget: Budget, load: Load, decoding: Load) -> list[TokenTree]:
    try:
        return budget.choose(trees, load, decoding)
    except Exception:
        log.exception("choosing nodes failed; the pass has no drafts")
        return [EMPTY_TREE] * len(trees)


def _ends(trees: Mapping[LiveRequest, TokenTree], budget: Budget, decoding: Load) -> dict[str, tuple[int, ...]]:
    """Which rows of requests have streams, by request id. Errors cost speed, and nothing else."""
    streaming = {request: tree for request, tree in trees.items() if request.streams is not None}
    if not streaming:
        return {}
    try:
        prices = prices_of(decoding, budget)
        return {request.id: request.take_ends(tree, budget, prices) for request, tree in streaming.items()}
    except Exception:
        log.exception("choosing rows for streams failed; the pass has none")
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


def _part(request: LiveRequest, chain: int, tree: TokenTree, ends: tuple[int, ...]) -> Part:
    end, plan = request.computed + chain, request.message.plan
    wants = request.observes
    rows = Rows(
        request_id=request.id,
        context=request.computed,
        tokens=(*request.tokens[request.computed : end], *tree.tokens),
        parents=tree.parents,
        logits=1 + len(tree) if _verified(request, chain) else 0,
        top_k=wants.top_k,
        tried=tree if plan.acceptance == "rejection" else None,
        layers=wants.layers if wants.prompt or _verified(request, chain) else (),
        ends=tuple(chain + end for end in ends),
    )
    stream_rows = 0.0 if request.streams is None else len(ends) * request.streams.rows * request.streams.share
    return Part(request=request, rows=rows, tree=tree, stream_rows=stream_rows)


def load_of(parts: Sequence[Part]) -> Load:
    """The load of a pass over ``parts``, tree nodes and streams included."""
    return Load(
        rows=sum(len(part.rows.tokens) for part in parts) + round(sum(part.stream_rows for part in parts)),
        requests=len(parts),
        keys=sum(part.rows.context for part in parts),
        row_keys=sum(part.rows.context * len(part.rows.tokens) for part in parts),
    )


def finish_pass(target: Target, parts: list[Part], times: StepTimes) -> None:
    """Finish the oldest pass and verify its trees. Runs in the target's thread; touches only the target and the parts.

    An error of one request is stored in its part; an error of the whole pass is raised.
    """
    with times.measure("forward"):
        outcomes = target.finish()
    times.move(target.choosing_s, "forward", "choose")
    kept = [list(range(part.rows.chain)) for part in parts]
    for part, outcome, rows in zip(parts, outcomes, kept, strict=True):
        if not part.rows.logits:
            continue
        try:
            with times.measure("choose"):
                part.verdict = verify(part.request, part.tree, outcome)
            rows += [part.rows.chain + node for node in part.verdict.accepted_path]
        except Exception as error:
            part.error = error
    observed = {
        part.request.id: rows[0 if part.request.observes.prompt else _first_chosen(part) :]
        for part, rows in zip(parts, kept, strict=True)
        if part.rows.layers and part.error is None
    }
    if observed:
        target.fetch_features(observed)
    for part, rows in zip(parts, kept, strict=True):
        if part.error is not None:
            continue
        try:
            if part.rows.layers:
                _observe(target, part, rows)
        except Exception as error:
            part.error = error
            continue
        with times.measure("keep"):
            target.keep(part.request.id, part.rows.context, rows)


def whole_pass(target: Target, parts: list[Part], times: StepTimes) -> None:
    """Begin a pass and finish it, see ``finish_pass``."""
    with times.measure("begin"):
        target.begin([part.rows for part in parts])
    finish_pass(target, parts, times)


def _observe(target: Target, part: Part, rows: Sequence[int]) -> None:
    """Take the hidden states of the kept rows: those that tokens were chosen from, and the prompt's rows before them."""
    chosen = _first_chosen(part)
    if part.request.observes.prompt and chosen:
        part.prompt_features = target.features(part.request.id, rows[:chosen])
    if part.verdict is not None:
        part.verdict = with_features(part.verdict, target.features(part.request.id, rows[chosen:]))


def _first_chosen(part: Part) -> int:
    """Number of the rows after which no token was chosen: the prompt's."""
    return part.rows.chain - 1 if part.verdict is not None else part.rows.chain
