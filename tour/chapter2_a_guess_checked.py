"""Chapter 2. A guess checked: the target reads guessed tokens in one pass, and keeps those that it would have said.

The guesser here has ten lines. It looks for the last two tokens earlier in the text and guesses that what followed them
there follows again. It is often wrong. That costs time, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from speculation.acceptance import StopRule, walk
from speculation.tree import ROOT, chain
from speculation.types import EMPTY_TREE, Observation, SamplingParams, TokenTree
from tour.chapter1_plain_decoding import COPY, LENGTH, QUESTION, ended, plain
from tour.model import Model, console, open_model, say


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedPass:
    """What one pass brought.

    Attributes:
        path: the guesses that were right, as nodes of ``tree``.
        tokens: what it added to the text.
        observation: the likeliest tokens after each of its rows, for guessers that learn from them.
    """

    tree: TokenTree
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: float
    observation: Observation


# Is told the text so far and the passes so far, and guesses what follows.
Guess = Callable[[Sequence[int], Sequence[DecodedPass]], TokenTree]


def look_up(text: Sequence[int], passes: Sequence[DecodedPass]) -> TokenTree:
    """Guess the four tokens that followed when the last two tokens occurred before."""
    last = tuple(text[-2:])
    for start in range(len(text) - 3, -1, -1):
        if tuple(text[start : start + 2]) == last:
            return chain(text[start + 2 : start + 6], "look_up")
    return EMPTY_TREE


def decode(model: Model, prompt: Sequence[int], sampling: SamplingParams, guess: Guess, top_k: int = 0) -> list[DecodedPass]:
    """The answer, pass by pass: the decoding loop of a speculative server without its queues and links.

    The guesser is shown the ``top_k`` likeliest tokens after every row.
    """
    passes: list[DecodedPass] = []
    text = list(prompt)
    with model.request(prompt, sampling) as request:
        # Tokens of the text that no pass has computed yet: the prompt at first, later the last token of each pass.
        new, tree = text, EMPTY_TREE
        while not ended(model, text[len(prompt) :], sampling):
            # The pass computes the guesses beside the token that is due anyway.
            started = time.perf_counter()
            outcome = request.run(new, tree, top_k)
            seconds = time.perf_counter() - started
            # choices[0] is the target's token after the text, choices[1 + i] its token after guess number i, provided that
            # the guesses up to i are right. `walk` follows the target's choices as far as there are guesses for them.
            ends, done = model.target.eos_token_ids, len(text) - len(prompt)
            stop = StopRule(stop_token_ids=ends, generated=done, room=sampling.max_tokens)
            accepted = walk(tree, lambda node: outcome.choices[node - ROOT], stop)  # noqa: B023
            # Rows of wrong guesses are forgotten: the next pass writes over them.
            request.keep([*range(len(new)), *(len(new) + node for node in accepted.path)])
            seen = Observation(tree=tree, top_ids=outcome.top_ids)
            passes.append(
                DecodedPass(tree=tree, path=accepted.path, tokens=accepted.tokens, seconds=seconds, observation=seen)
            )
            text += accepted.tokens
            new, tree = text[-1:], guess(text, passes)
    return passes


def tokens_of(passes: Sequence[DecodedPass]) -> list[int]:
    """The answer that these passes make."""
    return [token for each in passes for token in each.tokens]


def check_same(answer: Sequence[int], reference: Sequence[int]) -> None:
    """End the tour if a token differs."""
    if list(answer) != list(reference):
        raise AssertionError(f"the answers differ: {answer} and {reference}")


def coloured(model: Model, passes: Sequence[DecodedPass], colours: dict[str, str]) -> Text:
    """An answer in which a bar ends each pass, and right guesses have the colour of their source."""
    shown = Text()
    for each in passes:
        for place, token in enumerate(each.tokens):
            source = each.tree.sources[each.path[place]] if place < len(each.path) else ""
            shown.append(model.text([token]), style=colours.get(source, ""))
        shown.append("|", style="dim")
    return shown


def main() -> None:
    model = open_model()
    sampling = SamplingParams(max_tokens=LENGTH)
    for message in (COPY, QUESTION):
        prompt = model.prompt(message)
        passes = decode(model, prompt, sampling, look_up)
        answer = tokens_of(passes)
        check_same(answer, plain(model, prompt, sampling))
        console.print(f"[bold]> {message}[/bold]  ([green]green[/green]: guessed; a bar ends each pass)\n")
        console.print(coloured(model, passes, {"look_up": "green"}))
        guessed, right = sum(len(each.tree) for each in passes), sum(len(each.path) for each in passes)
        rate = len(answer) / len(passes)
        console.print(f"\n{len(answer)} tokens in {len(passes)} passes, those of plain decoding: {rate:.2f} in each pass.")
        console.print(f"{right} of {guessed} guesses were right.\n")
    say("""
        Every pass ends in a token that nobody guessed, so even a pass whose guesses are all wrong goes on by one token.

        [bold]Try[/bold] guessing eight tokens instead of four, or looking for the last three tokens instead of two. More
        tokens per pass? And fewer right guesses among all guesses? Chapter 6 asks what that is worth.
    """)


if __name__ == "__main__":
    main()
