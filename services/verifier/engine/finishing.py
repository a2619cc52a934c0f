"""Finishes passes: turns the target's outcomes into tokens and verdicts, and tells it which rows to keep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from services.verifier.engine.passes import Part, PassWork
from services.verifier.engine.stats import StepTimes
from services.verifier.engine.verify import verdict_of, verify, verify_together, with_features
from services.verifier.model.target_port import Outcome, Target
from services.verifier.model.tree_rows import TreeOutcomes
from speculation.types import Verdict


def finish_pass(target: Target, work: PassWork, times: StepTimes) -> None:
    """Finish the oldest pass and verify its trees. Runs in the target's thread; touches only the target and the work.

    An error of one request is stored in its part; an error of the whole pass is raised.
    """
    with times.measure("forward"):
        outcomes = target.finish()
    times.move(target.choosing_s, "forward", "choose")
    singles, parts, alone = work.singles, work.parts, len(work.singles)
    with times.measure("choose"):
        if alone:
            singles.decide(outcomes[:alone] if parts else outcomes)
        kept = _decided(work, outcomes[alone:] if alone else outcomes)
    with times.measure("keep"):
        if singles.requests:
            target.keep_singles(singles.rows)
        if kept is None:
            assert work.treed is not None and work.treed.walked is not None
            target.keep_paths(work.treed.rows, work.treed.walked.paths)
            return
    if any(rows.layers for rows in work.part_rows):
        _observe_all(target, work, kept)
    with times.measure("keep"):
        for part, rows, kept_rows in zip(parts, work.part_rows, kept, strict=True):
            if part.error is None:
                target.keep(rows.request_id, rows.context, kept_rows)


def _decided(work: PassWork, outcomes: Sequence[Outcome]) -> list[list[int]] | None:
    """Give parts their verdicts, if their rows reach the end of the prompt.

    Returns:
        The rows of each to keep; None: those that ``work.treed`` has found, from which verdicts are made later.
    """
    treed, parts = work.treed, work.parts
    if treed is not None and isinstance(outcomes, TreeOutcomes) and (ending := treed.walk(outcomes)) is not None:
        assert treed.walked is not None
        for number in ending:
            _decided_alone(parts[number], outcomes[number])
            if (verdict := parts[number].verdict) is not None:
                treed.walked.paths[number] = verdict.accepted_path
        return None
    kept: list[list[int]] = []
    outcomes = [*outcomes]
    for part, outcome, verdict in zip(parts, outcomes, _walked(parts, outcomes), strict=True):
        if verdict is None:
            kept.append(_decided_alone(part, outcome))
            continue
        part.verdict = verdict
        kept.append([0, *[1 + node for node in verdict.accepted_path]])
    return kept


def make_verdicts(work: PassWork) -> None:
    """Make the verdicts for which ``finish_pass`` has noted all there is; in the event loop's thread."""
    if work.treed is None or work.treed.walked is None:
        return
    walked, contexts = work.treed.walked, work.treed.rows.contexts
    for part, context, ids, path, tokens in zip(work.parts, contexts, work.treed.top_ids, *walked, strict=True):
        # Whose answer ends has one.
        if part.verdict is None and part.error is None:
            part.verdict = verdict_of(path, tokens, context + 1, part.tree, ids)


def _walked(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> list[Verdict | None]:
    """The verdicts of those parts that are only walked; None: it is to be verified alone."""
    walking = [_only_walks(part, outcome) for part, outcome in zip(parts, outcomes, strict=True)]
    if True not in walking:
        return [None] * len(parts)
    own = [*compress(parts, walking)]
    found = verify_together([part.request for part in own], [part.tree for part in own], [*compress(outcomes, walking)])
    verdicts = iter(found)
    return [next(verdicts) if walks else None for walks in walking]


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


def _observe_all(target: Target, work: PassWork, kept: Sequence[Sequence[int]]) -> None:
    """Take the hidden states that parts ask for, with one wait for them all."""
    of_parts = zip(work.parts, work.part_rows, kept, strict=True)
    asking = [(part, own) for part, rows, own in of_parts if rows.layers and part.error is None]
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
