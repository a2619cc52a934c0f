"""One pass: which rows each live request contributes, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from speculation.ports import Rows, Target
from speculation.session import Session
from speculation.stats import StepTimes
from speculation.types import EMPTY_TREE, TokenTree, Verdict
from speculation.verify import verify


@dataclass(kw_only=True, slots=True)
class Part:
    """A request's share of one pass. ``verdict`` stays None while its prompt is not through, ``error`` unless it failed."""

    session: Session
    rows: Rows
    tree: TokenTree = EMPTY_TREE
    verdict: Verdict | None = None
    error: Exception | None = None


def plan_parts(sessions: Iterable[Session], max_nodes: int, prompt_rows: int) -> list[Part]:
    """Every request's rows for the coming pass.

    Args:
        max_nodes: most tree nodes of one request.
        prompt_rows: most rows of prompts, over all requests; who finds none left waits for the next pass.
    """
    parts = []
    for session in sessions:
        pending = len(session.tokens) - session.computed
        chain = min(pending, prompt_rows) if pending > 1 else 1
        if chain == 0:
            continue
        if pending > 1:
            prompt_rows -= chain
        parts.append(_plan_part(session, chain, max_nodes))
    return parts


def _plan_part(session: Session, chain: int, max_nodes: int) -> Part:
    """``chain`` tokens from where the session is computed, and its tree if they reach the pending token."""
    end = session.computed + chain
    verified = end == len(session.tokens)
    tree = session.take_tree(max_nodes) if verified else EMPTY_TREE
    rows = Rows(
        session_id=session.id,
        context=session.computed,
        tokens=(*session.tokens[session.computed : end], *tree.tokens),
        parents=tree.parents,
        logits=1 + len(tree) if verified else 0,
    )
    return Part(session=session, rows=rows, tree=tree)


def run_pass(target: Target, parts: list[Part], times: StepTimes) -> None:
    """Forward and verify; runs in the target's thread and touches only the target and the parts.

    What goes wrong with one request's verdict is noted in its part; what goes wrong with the pass is raised.
    """
    with times.measure("forward"):
        logits = target.forward([part.rows for part in parts])
    for part, part_logits in zip(parts, logits, strict=True):
        rows = list(range(part.rows.chain))
        if part.rows.logits:
            try:
                with times.measure("choose"):
                    part.verdict = verify(part.session, part.tree, part_logits)
                rows += [part.rows.chain + node for node in part.verdict.accepted_path]
            except Exception as error:
                part.error = error
                continue
        with times.measure("keep"):
            target.keep(part.session.id, part.rows.context, rows)
