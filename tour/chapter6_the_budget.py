"""Chapter 6. The budget: a pass checks as many guesses as pay, and none if none does.

A guess that is right saves a pass. A guess that is wrong has made a pass longer. Which is more depends on three things: how
probable the guess is (chapter 5), what a row more costs on this machine (chapter 1), and how many other requests share the
pass. The first two are measured, the third is counted, and then it is arithmetic: take the number of guesses with the most
expected tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence

from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.tree import chain
from speculation.types import EMPTY_TREE, SamplingParams, TokenTree
from tour.chapter1_plain_decoding import CODE, QUESTION
from tour.chapter2_a_guess_checked import DecodedPass, Guess, check_same, decode, tokens_of
from tour.chapter5_merging_sources import Blended
from tour.model import Model, console, open_model, say

LENGTH, MOST = 48, 32


def load(requests: int, rows: int = 0) -> Load:
    """A pass with one due token for each of ``requests``, and ``rows`` guesses."""
    context = 100 * requests
    return Load(rows=requests, requests=requests, keys=context, row_keys=context).plus(rows)


def show_costs(costs: CostTable) -> None:
    """What the machine is like."""
    console.print("What a pass costs here, measured when a verifier starts:\n")
    for requests in (1, 16):
        found = [f"{1000 * costs.seconds(load(requests, rows)):.1f}" for rows in (0, 1, 3, 7, 15, 31)]
        console.print(f"  {requests:2} requests and 0, 1, 3, 7, 15, 31 guesses: {', '.join(found)} ms")


def show_choices(costs: CostTable) -> None:
    """What the budget keeps of the same guesses, by load and by how sure they are."""
    console.print("\nOf eight guesses in a row, so many are checked, by their probability and the number of requests:\n")
    console.print("  probability     1 request   4 requests   16 requests   64 requests")
    for each in (0.9, 0.7, 0.5, 0.3, 0.1):
        tree = chain(range(8), "suffix", [each ** (depth + 1) for depth in range(8)])
        kept = []
        for requests in (1, 4, 16, 64):
            chosen = MeasuredBudget(costs, max_nodes=MOST).choose([tree] * requests, load(requests), load(requests))
            kept.append(sum(map(len, chosen)) / requests)
        console.print(f"  {each:11.0%}" + "".join(f"{count:13.1f}" for count in kept))


def budgeted(guess: Guess, costs: CostTable) -> Guess:
    """The same guesses, cut to what pays. The budget learns from every pass how long it took, and what came true."""
    budget = MeasuredBudget(costs, max_nodes=MOST)

    def cut(text: Sequence[int], passes: Sequence[DecodedPass]) -> TokenTree:
        last = passes[-1]
        if len(passes) > 1:
            budget.learn(load(1, len(last.tree)), last.seconds, [(last.tree, last.path)])
        return budget.choose([guess(text, passes)], load(1), load(1))[0]

    return cut


def race(model: Model, message: str, costs: CostTable) -> None:
    """The same answer three times: no guesses, all guesses, and those that the budget keeps."""
    prompt, sampling = model.prompt(message), SamplingParams(max_tokens=LENGTH)
    console.print(f"\n[bold]> {message}[/bold]\n")
    blended = [Blended(("suffix", "recycling"), len(prompt)).guess for _ in range(2)]
    ways: dict[str, Guess] = {"no guesses": lambda text, passes: EMPTY_TREE}
    ways |= {"all guesses": blended[0], "what pays": budgeted(blended[1], costs)}
    answers = []
    for name, guess in ways.items():
        passes = decode(model, prompt, sampling, guess, top_k=8)
        answers.append(tokens_of(passes))
        check_same(answers[-1], answers[0])
        # The first pass reads the prompt, which no guess can save.
        after = passes[1:]
        seconds, checked = sum(each.seconds for each in after), sum(len(each.tree) for each in after)
        tokens = sum(len(each.tokens) for each in after)
        console.print(
            f"  {name:12} {len(passes):3} passes, {checked / len(after):4.1f} guesses in each, "
            f"{1000 * seconds / len(after):5.1f} ms each, {tokens / seconds:4.0f} tokens per second"
        )


def main() -> None:
    model = open_model()
    costs = model.costs()
    show_costs(costs)
    show_choices(costs)
    for message in (CODE, QUESTION):
        race(model, message, costs)
    say("""
        The budget maximises what it expects. Where other programs use the machine, a pass may take longer than expected. And
        it cannot make drafting itself free: asking drafters also takes time, which
        the engine measures as well (docs/decisions.md).

        [bold]Try[/bold] a cost table of your own: CostTable(by_rows={1: 1.0, 256: 1.0}, per_request=0, per_key=0) is a
        machine on which rows cost nothing, as on a large idle GPU. What does show_choices print for it?
    """)


if __name__ == "__main__":
    main()
