"""Log-probabilities of a request's prompt, gathered pass by pass, and told with the answer's first token."""

from __future__ import annotations

from collections.abc import Sequence

from speculation.types import TokenLogprobs


class PromptScores:
    """Those of one request's prompt, from its second token on.

    Attributes:
        wanted: they are wanted and have not been told, so all of the prompt has to be computed.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self._found: list[TokenLogprobs] = []

    def of_pass(self, tokens: Sequence[int], computed: int, end: int, *, verified: bool) -> tuple[int, ...]:
        """The tokens whose log-probabilities a pass over the tokens from ``computed`` to ``end`` gives.

        Args:
            verified: the pass reaches the last token, after which the answer's first one is chosen.
        """
        return tuple(tokens[computed + 1 : end if verified else end + 1]) if self.wanted else ()

    def add(self, computed: int, found: Sequence[TokenLogprobs]) -> None:
        """Keep those of the tokens that follow ``computed``; some may be known from before a preemption."""
        del self._found[computed:]
        self._found += found

    def take(self) -> tuple[TokenLogprobs, ...]:
        """All of them, once."""
        found, self._found, self.wanted = tuple(self._found), [], False
        return found
