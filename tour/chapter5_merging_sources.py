"""Chapter 5. Merging sources: one tree of the likeliest paths, whoever proposes them.

From here on the drafters are the real ones. `suffix` counts what followed every ending of the text (SuffixDecoding), and
`recycling` is chapter 4's idea with more memory. Which one should get the places in the tree? Neither. Each names
candidates, a calibrator says how probable each candidate is, and the tree takes the likeliest, one by one.

The calibrator learns that while the answer is written. Once the text has passed a node, it is known which candidate there
was right, also among those that were never checked. No experiment is needed, because guesses change no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from services.drafter.config import DrafterConfig
from services.drafter.merging.blend import BlendSession
from services.drafter.merging.calibrator import Calibrator
from services.drafter.sources.catalogue import make_source
from services.drafter.sources.interfaces import PathSession, TextSource
from speculation.messages import OpenSession, StepReport
from speculation.types import SamplingParams, TokenTree
from tour.chapter1_plain_decoding import CODE, LENGTH
from tour.chapter2_a_guess_checked import DecodedPass, check_same, coloured, decode, tokens_of
from tour.chapter4_trees import drawn
from tour.model import console, open_model, say

COLOURS = {"suffix": "cyan", "recycling": "green"}
NODES = 8
# Two kinds of candidates, and how a source would describe them.
KINDS = {
    "own:1:1:0.95": "suffix: the last token occurred once, and this followed",
    "top:1:0": "recycling: the likeliest the last time that the last token was computed",
}


class Blended:
    """Real sources of drafts for one answer, joined under one calibrator, as the drafter service joins them."""

    def __init__(self, names: Sequence[str], prompt_length: int) -> None:
        self._made = {name: cast(TextSource, make_source(name, DrafterConfig())) for name in names}
        prior = {kind: value for source in self._made.values() for kind, value in (source.prior or {}).items()}
        self.calibrator = Calibrator(prior)
        self._prompt_length = prompt_length
        self._session: BlendSession | None = None

    def guess(self, text: Sequence[int], passes: Sequence[DecodedPass]) -> TokenTree:
        """The ``NODES`` likeliest nodes after ``text``."""
        if self._session is None:
            self._session = self._open(text)
        else:
            last = passes[-1]  # Drafters are told which tokens came, and the likeliest tokens that the pass showed.
            told = StepReport(
                session_id="tour", committed=last.tokens, length=len(text), prefix_hash=0, accepted_path=last.path,
                max_nodes=NODES, observation=last.observation,
            )  # fmt: skip
            self._session.observe(told)
        return self._session.draft(NODES)

    def _open(self, text: Sequence[int]) -> BlendSession:
        names = tuple(self._made)
        opening = OpenSession(
            session_id="tour", tokens=tuple(text), prompt_length=self._prompt_length, sources=names, max_nodes=NODES
        )
        opened = {name: cast(PathSession, source.open(opening)) for name, source in self._made.items()}
        return BlendSession(opened, self.calibrator)


def said_and_come_true(passes: Sequence[DecodedPass]) -> None:
    """Print how often nodes were right, by the probability that they were given."""
    nodes = [(score, node in each.path) for each in passes for node, score in enumerate(each.tree.scores)]
    console.print("\nProbabilities that the calibrator gave, and what came of them:\n")
    for low, high in ((0.0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 1.01)):
        found = [(score, right) for score, right in nodes if low <= score < high]
        if found:
            said, came = (sum(each[at] for each in found) / len(found) for at in (0, 1))
            console.print(f"  {len(found):4} nodes: said {said:4.0%}, right {came:4.0%}")


def main() -> None:
    model = open_model()
    prompt, sampling = model.prompt(CODE), SamplingParams(max_tokens=LENGTH)
    answers = []
    for names in (("suffix",), ("recycling",), ("suffix", "recycling")):
        blended = Blended(names, len(prompt))
        before = {kind: blended.calibrator.probabilities([(0, (kind,))])[0] for kind in KINDS}
        passes = decode(model, prompt, sampling, blended.guess, top_k=8)
        answers.append(tokens_of(passes))
        rate = len(answers[-1]) / len(passes)
        console.print(f"{' and '.join(names):21} {len(passes)} passes, {rate:.2f} tokens in each")
        check_same(answers[-1], answers[0])
    console.print("\nThe last answer: [cyan]suffix[/cyan] and [green]recycling[/green] guessed these tokens.\n")
    console.print(coloured(model, passes, COLOURS))
    console.print("\nIts tree with most guesses right, each node with the probability of its path:\n")
    console.print(drawn(model, max(passes, key=lambda each: len(each.path)), COLOURS))
    said_and_come_true(passes)
    console.print("\nWhat the calibrator believed of two kinds of candidates before the answer, and after it:\n")
    for kind, what in KINDS.items():
        after = blended.calibrator.probabilities([(0, (kind,))])[0]
        console.print(f"  {before[kind]:4.0%} -> {after:4.0%}  {what}")
    say("""
        [bold]Try[/bold] a third source, `spectra_core`, in the last tuple of `main`. It proposes whole trees and has no
        prior: what does services/drafter/sessions/text_group.py do to let it take part?
    """)


if __name__ == "__main__":
    main()
