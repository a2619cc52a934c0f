"""Where the tokens of an answer's steps come from, for users who ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from services.api.origins import DraftedNodes, ReportedPass, TokenOrigin
from services.router.tokens import Tokens
from speculation.messages import PassReport
from speculation.sources import TARGET
from speculation.tree import claims


class Origins:
    """What answers tell of their drafts.

    Args:
        tokens: spells the tokens of trees.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def of_tokens(self, accepted: Sequence[str], begin: int, ends: Sequence[int]) -> tuple[TokenOrigin, ...]:
        """Of a step's tokens, which begin with the accepted path.

        Args:
            accepted: the sources of that path.
            begin, ends: characters of the answer before the first token, and up to the end of each.
        """
        guessed = accepted[: len(ends)]
        sources = (*guessed, *(TARGET,) * (len(ends) - len(guessed)))
        spans = zip(sources, pairwise((begin, *ends)), strict=True)
        return tuple(TokenOrigin(source=source, text_length=end - start) for source, (start, end) in spans)

    def of_pass(self, report: PassReport | None, taken: int) -> tuple[ReportedPass, ...]:
        """The step's pass, where the verifier tells of it.

        Args:
            taken: tokens of the step that the answer has; a stop string may have dropped others.
        """
        if report is None:
            return ()
        return (
            ReportedPass(
                checked=self._nodes(report, 0, report.checked),
                dropped=self._nodes(report, report.checked, len(report.tree)),
                accepted=report.accepted_path[:taken],
                committed=taken,
                pass_s=report.seconds,
                wait_s=report.waited_s,
                requests=report.requests,
            ),
        )

    def _nodes(self, report: PassReport, begin: int, end: int) -> DraftedNodes:
        tree = report.tree
        tokens = tree.tokens[begin:end]
        return DraftedNodes(
            tokens=tokens,
            texts=self._tokens.texts(tokens),
            parents=tree.parents[begin:end],
            sources=tree.sources[begin:end],
            probabilities=tuple(claims(tree)[begin:end]),
        )
