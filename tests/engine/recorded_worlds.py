"""Made-up recordings for a simulated service: the real text sources, budget and loop, and a target that says the recording."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache

from lab.regret.recorded_answers import TOP, RecordedAnswer
from lab.regret.simulated_service import Machine, SimulatedService

VOCAB = 512
PROMPT = 24


def likeliest(text: Sequence[int]) -> tuple[int, ...]:
    """What the target finds likely where it was not recorded: ids that the last token decides."""
    return _after(text[-1])


@cache
def _after(token: int) -> tuple[int, ...]:
    numbers = random.Random(token)
    return tuple(dict.fromkeys(numbers.randrange(VOCAB - 1) for _ in range(16)))


def answer_of(text: Sequence[int], task: str = "") -> RecordedAnswer:
    """A recording whose first tokens are the prompt. It was likelier than what the last token decides."""
    top = [
        (token, *(each for each in _after(before) if each != token))[:TOP]
        for before, token in zip(text[PROMPT - 1 :], text[PROMPT:], strict=False)
    ]
    return RecordedAnswer(
        task=task, temperature=0.0, prompt_ids=tuple(text[:PROMPT]), output_ids=tuple(text[PROMPT:]), top_ids=tuple(top)
    )


def service_of(machine: Machine, answers: Sequence[RecordedAnswer]) -> SimulatedService:
    """One that says ``answers``."""
    return SimulatedService(machine, answers, vocab_size=VOCAB, elsewhere=likeliest)


def recordings(seed: int) -> Mapping[str, RecordedAnswer]:
    """Texts of some 200 tokens: one new, one that repeats itself, one that changes twice, and code-like phrases."""
    numbers = random.Random(seed)

    def new(count: int) -> list[int]:
        return [numbers.randrange(VOCAB - 1) for _ in range(count)]

    passage, phrases = new(30), [new(6) for _ in range(6)]
    texts = {
        "new": new(PROMPT + 180),
        "repeats": [*new(PROMPT), *passage, *passage, *passage, *passage, *passage, *passage],
        "changes": [*new(PROMPT), *new(60), *passage, *passage, *passage, *new(60)],
        "phrases": [*new(PROMPT), *(token for _ in range(30) for token in numbers.choice(phrases))],
    }
    return {name: answer_of(text, name) for name, text in texts.items()}
