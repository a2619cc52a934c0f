"""Chapter 4. Trees: several guesses for one place, checked in the same pass.

A chain of guesses ends at its first wrong token. If the guesser hesitates between two tokens, a tree holds both, and what
may follow each. The pass computes all nodes at once: a mask lets every node look back at its own path only, so each one is
computed as if the other branches did not exist.

Where do the second-best guesses come from? Here from the target itself. Every pass shows the likeliest tokens after each of
its rows, wrong guesses included, and usually that is thrown away. Token recycling (Luo et al. 2024) keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.tree import Tree

from speculation.tree import ROOT
from speculation.types import SamplingParams, TokenTree
from tour.chapter1_plain_decoding import CODE, LENGTH
from tour.chapter2_a_guess_checked import DecodedPass, check_same, decode, tokens_of
from tour.model import Model, console, open_model, say

# Nodes of a tree, and how many successors of a token it may hold.
NODES, WIDTH = 8, 2


class Recycler:
    """Guesses from the tokens that the target held likely after each token, the last time that it computed it.

    Args:
        width: how many successors of each node are guessed; 1 makes chains.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._likely: dict[int, Sequence[int]] = {}

    def guess(self, text: Sequence[int], passes: Sequence[DecodedPass]) -> TokenTree:
        """A tree of ``NODES`` nodes, level by level."""
        last = passes[-1]
        before = text[len(text) - len(last.tokens) - 1]
        self._likely.update(zip((before, *last.tree.tokens), last.observation.top_ids, strict=True))
        tokens: list[int] = []
        parents: list[int] = []
        # Nodes whose successors are still to come, the text's last token first.
        waiting = [(ROOT, text[-1])]
        while waiting and len(tokens) < NODES:
            parent, token = waiting.pop(0)
            for successor in self._likely.get(token, ())[: self._width]:
                if len(tokens) < NODES:
                    waiting.append((len(tokens), successor))
                    tokens.append(successor)
                    parents.append(parent)
        return TokenTree(tokens=tuple(tokens), parents=tuple(parents), sources=("recycling",) * len(tokens))


def drawn(model: Model, each: DecodedPass, colours: dict[str, str]) -> Tree:
    """A pass's tree. Right guesses have the colour of their source, and scores are shown where there are any."""
    places = {ROOT: Tree("[dim]the text so far[/dim]")}
    for node, (token, source) in enumerate(zip(each.tree.tokens, each.tree.sources, strict=True)):
        score = f" {each.tree.scores[node]:.2f} {source}" if each.tree.scores else ""
        style = colours[source] if node in each.path else "dim"
        label = f"[{style}]{escape(repr(model.text([token])))}{score}[/{style}]"
        places[node] = places[each.tree.parents[node]].add(label)
    return places[ROOT]


def main() -> None:
    model = open_model()
    prompt, sampling = model.prompt(CODE), SamplingParams(max_tokens=LENGTH)
    found = {}
    for width in (1, WIDTH):
        found[width] = decode(model, prompt, sampling, Recycler(width).guess, top_k=WIDTH)
        passes, answer = len(found[width]), tokens_of(found[width])
        shape = "chains" if width == 1 else f"trees, {width} successors each"
        rate = len(answer) / passes
        console.print(f"{NODES} nodes as {shape}: {len(answer)} tokens in {passes} passes, {rate:.2f} in each")
    check_same(tokens_of(found[1]), tokens_of(found[WIDTH]))

    # Nodes are numbered level by level, so the largest sum is of a deep path that is not the first branch everywhere.
    best = max(found[WIDTH], key=lambda each: sum(each.path))
    console.print("\nA pass of the second run. What the target would have said itself is green:\n")
    console.print(drawn(model, best, {"recycling": "green"}))
    console.print(f"\n{len(best.path)} guesses were right; with the token after them the pass brought {len(best.tokens)}.")
    console.print(f"The tree's tokens {best.tree.tokens}\n    parents {best.tree.parents}, -1: the last token of the text\n")
    say("""
        [bold]Try[/bold] WIDTH = 4 with the same number of nodes. A wide tree is shallow. When is that better? The best tree
        has the nodes that are likeliest to be right, whatever its shape. For that, somebody must know them: chapter 5.
    """)


if __name__ == "__main__":
    main()
