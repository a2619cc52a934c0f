"""Chapter 1. Plain decoding: one token per pass, and why a pass over eight tokens costs hardly more than one.

A language model takes tokens and says, after each of them, how likely every token of its vocabulary is to come next. Plain
decoding takes the likeliest, appends it, and asks again. Everything later in this tour gives the very tokens that this file
gives, in fewer passes.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Sequence

from rich.markup import escape

from speculation.types import SamplingParams
from tour.model import Model, OpenRequest, console, open_model, say

# What the other chapters ask, too. The first answer copies the prompt, the second repeats itself, the third does neither.
COPY = "Copy this list of cities, one a line: Rome, Oslo, Lima, Cairo, Tokyo, Paris, Berlin, Madrid, Vienna, Prague."
CODE = "Write a Python class Point with fields x and y and the methods __add__, __sub__ and __mul__."
QUESTION = "Why is the sky blue? Answer in two sentences."
LENGTH = 64


def plain(model: Model, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """The answer, token by token."""
    answer: list[int] = []
    with model.request(prompt, sampling) as request:
        # The first pass reads the whole prompt. For each of its tokens, the layers compute a key and a value, which later
        # tokens look back at. They are kept: that is the KV cache. So every later pass computes one new token alone.
        new: Sequence[int] = prompt
        while not ended(model, answer, sampling):
            outcome = request.run(new)
            request.keep(range(len(new)))
            # There was one row to choose after, the last one. `choices` holds one token for each such row.
            answer.append(outcome.choices[0])
            new = answer[-1:]
    return answer


def ended(model: Model, answer: Sequence[int], sampling: SamplingParams) -> bool:
    """Whether the answer is long enough, or its last token ends it."""
    return len(answer) >= sampling.max_tokens or (bool(answer) and answer[-1] in model.target.eos_token_ids)


def seconds_of_a_pass(request: OpenRequest, rows: int) -> float:
    """The shortest of five passes over ``rows`` tokens. Nothing is kept, so each begins at the same place."""
    return min(timeit.repeat(lambda: request.run([11] * rows), number=1, repeat=5))


def main() -> None:
    model = open_model()
    prompt, sampling = model.prompt(CODE), SamplingParams(max_tokens=LENGTH)
    console.print(f"[bold]> {CODE}[/bold]\n")
    started = time.perf_counter()
    answer = plain(model, prompt, sampling)
    took = time.perf_counter() - started
    console.print(escape(model.text(answer)))
    each = 1000 * took / len(answer)
    console.print(f"\n{len(answer)} tokens, {len(answer)} passes, {each:.1f} ms each, the prompt's included.\n")

    # Where does the time of a pass go? Each weight of the model is read from memory once, whatever number of tokens it is
    # multiplied with. With few tokens, the reading takes longer than the arithmetic.
    console.print("How long does a pass take, by the number of tokens that it computes?\n")
    with model.request(prompt, sampling) as request:
        request.run(prompt)
        request.keep(range(len(prompt)))
        times = {rows: seconds_of_a_pass(request, rows) for rows in (1, 2, 4, 8, 16, 32)}
        for rows, seconds in times.items():
            share = seconds / rows / times[1]
            console.print(f"  {rows:2} tokens {1000 * seconds:6.1f} ms; each takes {share:4.0%} of a token's time alone")
    say("""
        So eight tokens in one pass are much cheaper than eight passes. But the second token is only known after the first
        pass. Unless somebody guesses it: chapter 2.

        [bold]Try[/bold] OMP_NUM_THREADS=1 in front of the command. Which passes become slower, and why not all alike?
    """)


if __name__ == "__main__":
    main()
