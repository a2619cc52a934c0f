"""Finishes passes: turns the target's outcomes into tokens and verdicts, and tells it which rows to keep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from services.verifier.engine.passes import Part, PassWork
from services.verifier.engine.stats import StepTimes
from services.verifier.engine.verify import verify, verify_together, with_features
from services.verifier.model.target_port import Outcome, Target


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
        kept = _decided(parts, outcomes[alone:])
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
    walking = [_only_walks(part, outcome) for part, outcome in zip(parts, outcomes, strict=True)]
    trees, requests = [part.tree for part in compress(parts, walking)], [part.request for part in compress(parts, walking)]
    verdicts = iter(verify_together(requests, trees, [*compress(outcomes, walking)]) if trees else ())
    kept: list[list[int]] = []
    for part, outcome, walks in zip(parts, outcomes, walking, strict=True):
        verdict = next(verdicts) if walks else None
        if verdict is None:
            kept.append(_decided_alone(part, outcome))
            continue
        part.verdict = verdict
        kept.append([0, *[1 + node for node in verdict.accepted_path]])
    return kept


def _only_walks(part: Part, outcome: Outcome) -> bool:
    """Whether the choices say all that is to be known of a part with one pending token."""
    nodes = len(part.tree.tokens)
    if part.chain != 1 or not part.verified or not nodes or part.tree.probes or len(outcome.choices) != 1 + nodes:
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
