"""One pass: which rows each live request contributes, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.stats import StepTimes
from services.verifier.engine.verify import verify, with_features
from speculation.budget import Budget
from speculation.costs import Load
from speculation.ports import Rows, Target
from speculation.types import EMPTY_TREE, TokenTree, Verdict


@dataclass(kw_only=True, slots=True)
class Part:
    """A request's share of one pass. ``verdict`` stays None while its prompt is not through, ``error`` unless it failed."""

    session: LiveRequest
    rows: Rows
    tree: TokenTree = EMPTY_TREE
    verdict: Verdict | None = None
    error: Exception | None = None


def plan_parts(sessions: Iterable[LiveRequest], budget: Budget, prompt_rows: int, everybody: Load) -> list[Part]:
    """Every request's rows for the coming pass.

    Args:
        prompt_rows: most rows of prompts, over all requests; who finds none left waits for the next pass.
        everybody: what all requests that are being decoded hold, in this pass or in another: they wait for it.
    """
    sessions = list(sessions)
    farthest = max((session.computed for session in sessions if len(session.tokens) - session.computed > 1), default=0)
    prompt_rows = budget.prompt_rows(everybody, prompt_rows, farthest)
    chains: list[tuple[LiveRequest, int]] = []
    for session in sessions:
        pending = len(session.tokens) - session.computed
        chain = min(pending, prompt_rows) if pending > 1 else 1
        if chain == 0:
            continue
        if pending > 1:
            prompt_rows -= chain
        chains.append((session, chain))
    load = Load(
        rows=sum(chain for _, chain in chains),
        requests=len(chains),
        keys=sum(session.computed for session, _ in chains),
        row_keys=sum(session.computed * chain for session, chain in chains),
    )
    verified = [session for session, chain in chains if _verified(session, chain)]
    keys = [session.computed for session in verified]
    decoding = Load(rows=len(keys), requests=len(keys), keys=sum(keys), row_keys=sum(keys))
    trees = [session.take_tree() for session in verified]
    choice = budget.choose(trees, load, decoding)
    for session, drafted, tree in zip(verified, trees, choice, strict=True):
        session.note_choice(len(drafted), len(tree))
    chosen = iter(choice)
    return [_part(session, chain, next(chosen) if _verified(session, chain) else EMPTY_TREE) for session, chain in chains]


def decoding_load(sessions: Iterable[LiveRequest]) -> Load:
    """What a pass holds of the requests whose prompt is through, without drafts."""
    keys = [session.computed for session in sessions if len(session.tokens) - session.computed == 1]
    return Load(rows=len(keys), requests=len(keys), keys=sum(keys), row_keys=sum(keys))


def _verified(session: LiveRequest, chain: int) -> bool:
    """Whether a pass over ``chain`` rows reaches the pending token, so that its logits decide something."""
    return session.computed + chain == len(session.tokens)


def _part(session: LiveRequest, chain: int, tree: TokenTree) -> Part:
    end = session.computed + chain
    rows = Rows(
        session_id=session.id,
        context=session.computed,
        tokens=(*session.tokens[session.computed : end], *tree.tokens),
        parents=tree.parents,
        logits=1 + len(tree) if _verified(session, chain) else 0,
        features=bool(session.request.plan.observe_layers) and _verified(session, chain),
    )
    return Part(session=session, rows=rows, tree=tree)


def load_of(parts: Sequence[Part]) -> Load:
    """What a pass over ``parts`` holds, nodes included."""
    return Load(
        rows=sum(len(part.rows.tokens) for part in parts),
        requests=len(parts),
        keys=sum(part.rows.context for part in parts),
        row_keys=sum(part.rows.context * len(part.rows.tokens) for part in parts),
    )


def finish_pass(target: Target, parts: list[Part], times: StepTimes) -> None:
    """Finish the oldest pass and verify; runs in the target's thread and touches only the target and the parts.

    What goes wrong with one request's verdict is noted in its part; what goes wrong with the pass is raised.
    """
    with times.measure("forward"):
        logits = target.finish()
    for part, part_logits in zip(parts, logits, strict=True):
        rows = list(range(part.rows.chain))
        if part.rows.logits:
            try:
                with times.measure("choose"):
                    part.verdict = verify(part.session, part.tree, part_logits)
                rows += [part.rows.chain + node for node in part.verdict.accepted_path]
                if part.rows.features:
                    features = target.features(part.session.id, rows[part.rows.chain - 1 :])
                    part.verdict = with_features(part.verdict, features)
            except Exception as error:
                part.error = error
                continue
        with times.measure("keep"):
            target.keep(part.session.id, part.rows.context, rows)
