"""Chapter 3. Why sampling stays exact: the noise belongs to the position, not to the pass.

With a temperature above 0 the target does not take the likeliest token: it draws one, each as often as its probability
says. A draw looks like a problem. If a pass draws differently from plain decoding, the answers differ. The classic remedy
(Leviathan et al. 2023) accepts a guess with probability min(1, p/q). Its answers have the right distribution, but which of
them comes depends on what was guessed.

Outrider makes the draw repeatable instead. Add noise to the logits, a different number for every token, and take the
largest sum. If the noise is Gumbel distributed, this draws token t with exactly its probability (the "Gumbel-max trick").
And if the noise is a pure function of (seed, position, token), then so is the draw. Guesses cannot reach it.
"""

from __future__ import annotations

from collections import Counter

import torch

from speculation.choose import choose
from speculation.philox import NoiseStream, gumbel
from speculation.types import SamplingParams
from tour.chapter1_plain_decoding import COPY, plain
from tour.chapter2_a_guess_checked import check_same, decode, look_up, tokens_of
from tour.model import console, open_model, say

LENGTH = 32


def draws_follow_the_distribution() -> None:
    """Draw one of four tokens twenty thousand times, at as many positions."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampling, seed, times = SamplingParams(temperature=1.0), 1, 20_000
    counts = Counter(choose(logits, sampling, seed, position) for position in range(times))
    console.print("Four tokens, drawn at 20,000 positions by argmax(logits + noise):\n")
    for token, probability in enumerate(torch.softmax(logits, dim=-1).tolist()):
        console.print(f"  token {token}  probability {probability:.3f}  drawn {counts[token] / times:.3f}")


def draws_repeat() -> None:
    """Show the noise of one position, asked for twice, and in another order."""
    ids = torch.arange(4).numpy()
    backwards = gumbel(7, NoiseStream.CHOICE, 100, ids[::-1].copy())
    for values in (gumbel(7, NoiseStream.CHOICE, 100, ids), backwards[::-1]):
        console.print(f"\nThe noise of seed 7 at position 100: {' '.join(f'{value:.4f}' for value in values)}")
    console.print("The second time it was asked for backwards. No generator has a state, so no order can matter.\n")


def answers_are_equal() -> None:
    """Sample real answers with and without guesses."""
    model = open_model()
    prompt = model.prompt(COPY)
    for seed in (2, 3):
        sampling = SamplingParams(temperature=0.7, seed=seed, max_tokens=LENGTH)
        reference = plain(model, prompt, sampling)
        passes = decode(model, prompt, sampling, look_up)
        check_same(tokens_of(passes), reference)
        console.print(f"[bold]seed {seed}[/bold]: {len(reference)} tokens, the same in {len(passes)} passes with guesses")
        console.print(f"  {model.text(reference)!r}", markup=False)


def main() -> None:
    draws_follow_the_distribution()
    draws_repeat()
    answers_are_equal()
    say("""
        The seed decides the answer, the guesses only how many passes it takes. So a server may change drafters in the
        middle of an answer, lose one, or move the answer to another machine, and go on with the same tokens.

        [bold]Try[/bold] temperature=2.0. Do fewer guesses come true? Then read speculation/rejection.py, the classic rule,
        and find the line because of which its answers depend on the draft.
    """)


if __name__ == "__main__":
    main()
