"""The default model's part: tokens per pass and end-to-end speed of n-grams, of each drafter, and of both together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.bench.records import Request
from benchmarks.papers.engine import Decoded, PaperEngine, RowDrafting, differs_at, with_trained
from benchmarks.replay.replay import Trace, replay
from benchmarks.sizes.arithmetic import DraftedRow
from speculation.errors import ConfigurationError
from speculation.types import SamplingParams

# What ``blend`` takes without a model.
TEXTS = ("suffix", "recycling")
# Most tokens of a plain answer that is measured beside a drafted one: enough for a median of steps.
_BESIDE_TOKENS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedAnswers:
    """What drafts brought.

    Attributes:
        changed: answers that differ from plain ones.
        plain_step_s: seconds of plain decoding's step, as it was between them.
    """

    rows: Sequence[DraftedRow]
    changed: Sequence[str]
    plain_step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainAnswers:
    """Plain decoding's answers, which all others are compared with.

    Attributes:
        step_s: seconds of a step.
    """

    requests: Sequence[Request]
    answers: Sequence[Decoded]
    step_s: float

    @property
    def traces(self) -> list[Trace]:
        """The answers as recordings."""
        pairs = zip(self.requests, self.answers, strict=True)
        return [Trace(prompt=request.prompt, output=answer.tokens, task=request.task) for request, answer in pairs]


def decode_plainly(
    engine: PaperEngine, requests: Sequence[Request], max_tokens: int, told: Callable[[str], None]
) -> PlainAnswers:
    """Plain decoding's answers.

    Raises:
        ConfigurationError: they are too short to be measured.
    """
    told("plain decoding")
    answers = [engine.answer(each, _params(each, max_tokens), plainly=True) for each in requests]
    step_s, _ = steady(answers)
    if not step_s:
        raise ConfigurationError("answers of three tokens are needed; name other prompts", about="--prompts")
    return PlainAnswers(requests=requests, answers=answers, step_s=step_s)


def decode_drafted(
    engine: PaperEngine,
    plain: PlainAnswers,
    drafters: Sequence[str],
    budgets: Sequence[int],
    max_tokens: int,
    told: Callable[[str], None],
) -> DraftedAnswers:
    """A row for n-grams, each drafter, and both together, at each budget.

    All drafts are waited for, and all of them are checked. Speeds are over plain decoding's of the same minute: each request
    is answered with and without drafts by turns, so that a machine whose speed drifts favours neither.
    """
    rows, changed, beside_all = list[DraftedRow](), list[str](), list[Decoded]()
    text_s = {budget: _text_seconds(engine, plain, budget) for budget in budgets}
    kinds = [("", False), *((name, beside) for name in drafters for beside in (False, True))]
    for drafter, beside in kinds:
        for budget in budgets:
            texts = TEXTS if beside or not drafter else ()
            sources = (*texts, *((drafter,) if drafter else ()))
            told(f"{' + '.join(sources)}, {budget} nodes")
            # Weights that nobody has asked for are warned of where they look useless, and measured all the same.
            config = with_trained(engine.config, asked_for=False)
            engine.draft(RowDrafting(sources=sources, nodes=budget, config=config))
            answers, plainly = _by_turns(engine, plain.requests, max_tokens)
            beside_all += plainly
            row = _row(drafter, budget, answers, plainly, text_s[budget] if texts else 0.0, beside=beside)
            rows.append(row)
            pairs = zip(plain.requests, answers, plain.answers, strict=True)
            changed += [f"{row.name}: {r.id}" for r, a, p in pairs if differs_at(a.tokens, p.tokens) is not None]
    return DraftedAnswers(rows=rows, changed=changed, plain_step_s=steady(beside_all)[0] or plain.step_s)


def _by_turns(engine: PaperEngine, requests: Sequence[Request], max_tokens: int) -> tuple[list[Decoded], list[Decoded]]:
    """Answers with drafts, and beginnings of them without; each goes first with every second request."""
    drafted, plainly = list[Decoded](), list[Decoded]()
    for number, each in enumerate(requests):
        for own in (True, False) if number % 2 else (False, True):
            tokens = min(max_tokens, _BESIDE_TOKENS) if own else max_tokens
            (plainly if own else drafted).append(engine.answer(each, _params(each, tokens), plainly=own))
    return drafted, plainly


def _params(request: Request, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, seed=request.seed)


def _row(
    drafter: str, budget: int, answers: Sequence[Decoded], plainly: Sequence[Decoded], text_s: float, *, beside: bool
) -> DraftedRow:
    passes = max(1, sum(len(each.arrivals) - 1 for each in answers))
    tokens = sum(count for each in answers for _, count in each.arrivals[1:])
    (step_s, brought), (plain_s, _) = steady(answers), steady(plainly)
    return DraftedRow(
        drafter=drafter,
        beside=beside,
        budget=budget,
        nodes=sum(sum(each.drafted_by.values()) for each in answers) / passes,
        tau=tokens / passes,
        text_s=text_s,
        measured=plain_s * brought / step_s if step_s and plain_s else None,
    )


def steady(answers: Sequence[Decoded]) -> tuple[float, float]:
    """The median seconds of a pass, and the tokens that it brings on average, of all passes behind an answer's second one.

    The second waits until a drafter has read the prompt. What else the machine does shows in a few passes, not in a median.
    """
    gaps = [(later[0] - before[0], later[1]) for each in answers for before, later in pairwise(each.arrivals[1:])]
    if not gaps:
        return 0.0, 0.0
    return statistics.median(seconds for seconds, _ in gaps), statistics.fmean(tokens for _, tokens in gaps)


def _text_seconds(engine: PaperEngine, plain: PlainAnswers, budget: int) -> float:
    """Seconds a step of the n-grams' drafts."""
    found = replay(plain.traces, TEXTS, budget, engine.config)
    return found.drafting_s / max(1, found.passes)
