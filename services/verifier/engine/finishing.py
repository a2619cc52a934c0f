"""Finishes passes: turns the target's outcomes into tokens and verdicts, and tells it which rows to keep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress

from services.verifier.engine.passes import Part, PassWork
from services.verifier.engine.stats import StepTimes
from services.verifier.engine.verify import verify, verify_together, with_features
from services.verifier.model.target_port import Outcome, Target
from services.verifier.model.tree_outcomes import TreeOutcomes
from speculation.types import Verdict


def finish_pass(target: Target, work: PassWork, times: StepTimes) -> None:
    """Finish the oldest pass and verify its trees. Runs in the target's thread; touches only the target and the work.

    An error of one request is stored in its part; an error of the whole pass is raised.
    """
    with times.measure("forward"):
        outcomes = target.finish()
    times.move(target.choosing_s, "forward", "choose")
    singles, parts = work.singles, work.parts
    with times.measure("choose"):
        alone = len(singles)
        singles.decide(outcomes[:alone] if parts else outcomes)
        kept = _decided(parts, outcomes[alone:] if alone else outcomes)
    if any(part.rows.layers for part in parts):
        _observe_all(target, parts, kept)
    with times.measure("keep"):
        if singles.requests:
            target.keep_singles(singles.rows)
        for part, kept_rows in zip(parts, kept, strict=True):
            if part.error is None:
                target.keep(part.rows.request_id, part.rows.context, kept_rows)


def _decided(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> list[list[int]]:
    """Give parts their verdicts, if their rows reach the end of the prompt. Returns the rows of each to keep."""
    if isinstance(outcomes, TreeOutcomes) and all(map(_has_one_tree, parts)):
        # No part needs an object of its own.
        requests, trees = [part.request for part in parts], [part.tree for part in parts]
        verdicts = verify_together(requests, trees, outcomes.ids, outcomes.top_ids)
    else:
        outcomes = [*outcomes]
        verdicts = _walked(parts, outcomes)
    kept: list[list[int]] = []
    for number, (part, verdict) in enumerate(zip(parts, verdicts, strict=True)):
        if verdict is None:
            kept.append(_decided_alone(part, outcomes[number]))
            continue
        part.verdict = verdict
        kept.append([0, *[1 + node for node in verdict.accepted_path]])
    return kept


def _walked(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> list[Verdict | None]:
    """The verdicts of those parts that are only walked; None: it is to be verified alone."""
    walking = [_only_walks(part, outcome) for part, outcome in zip(parts, outcomes, strict=True)]
    if True not in walking:
        return [None] * len(parts)
    own, choosing = [*compress(parts, walking)], [*compress(outcomes, walking)]
    choices = chain.from_iterable([outcome.choices for outcome in choosing])
    requests, trees = [part.request for part in own], [part.tree for part in own]
    verdicts = iter(verify_together(requests, trees, choices, [outcome.top_ids for outcome in choosing]))
    return [next(verdicts) if walks else None for walks in walking]


def _has_one_tree(part: Part) -> bool:
    """Whether a part is a pending token and nodes below it, which may all be accepted."""
    tree = part.tree
    return part.chain == 1 and part.verified and bool(tree.tokens) and not tree.probes


def _only_walks(part: Part, outcome: Outcome) -> bool:
    """Whether the choices say all that is to be known of a part with one pending token."""
    if not _has_one_tree(part) or len(outcome.choices) != 1 + len(part.tree.tokens):
        return False
    return outcome.distribution is None and outcome.logprobs is None and not outcome.scored


def _decided_alone(part: Part, outcome: Outcome) -> list[int]:
    """As ``_decided``, of one."""
    chain = part.chain
    rows = [0] if chain == 1 else list(range(chain))
    part.scored = outcome.scored
    if part.verified:
        try:
            verdict = part.verdict = verify(part.request, part.tree, outcome)
        except Exception as error:
            part.error = error
            return rows
        for node in verdict.accepted_path:
            rows.append(chain + node)
    return rows


def whole_pass(target: Target, work: PassWork, times: StepTimes) -> None:
    """Begin a pass and finish it, see ``finish_pass``."""
    with times.measure("begin"):
        target.begin(work.rows)
    finish_pass(target, work, times)


def _observe_all(target: Target, parts: Sequence[Part], kept: Sequence[Sequence[int]]) -> None:
    """Take the hidden states that parts ask for, with one wait for them all."""
    asking = [(part, rows) for part, rows in zip(parts, kept, strict=True) if part.rows.layers and part.error is None]
    if not asking:
        return
    asked = {part.request.id: rows[0 if part.request.observes.prompt else _first_chosen(part) :] for part, rows in asking}
    target.fetch_features(asked)
    for part, rows in asking:
        _observe(target, part, rows)


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
