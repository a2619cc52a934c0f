"""Log-probabilities of a prompt come pass by pass, once each, also where a preemption has them computed again."""

from __future__ import annotations

from services.verifier.engine.prompt_scores import PromptScores
from speculation.types import TokenLogprobs

PROMPT = (10, 11, 12, 13, 14)


def scored(tokens: tuple[int, ...]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id=token, logprob=-float(token)) for token in tokens]


def test_passes_add_up_to_the_prompt() -> None:
    scores = PromptScores(wanted=True)
    first = scores.of_pass(PROMPT, 0, 2, verified=False)
    scores.add(0, scored(first))
    # Preempted: the first two tokens are computed again, in another cut.
    first = scores.of_pass(PROMPT, 0, 3, verified=False)
    scores.add(0, scored(first))
    last = scores.of_pass(PROMPT, 3, 5, verified=True)
    scores.add(3, scored(last))
    assert (first, last) == ((11, 12, 13), (14,))
    assert [each.token_id for each in scores.take()] == list(PROMPT[1:])
    assert not scores.wanted
    assert scores.take() == ()


def test_nothing_is_scored_that_nobody_wants() -> None:
    assert PromptScores(wanted=False).of_pass(PROMPT, 0, 3, verified=False) == ()
