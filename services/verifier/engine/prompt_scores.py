"""Log-probabilities of a request's prompt, gathered over the passes that compute it."""

from __future__ import annotations

from collections.abc import Sequence

from speculation.messages import GenerationRequest
from speculation.types import TokenLogprobs


class PromptScores:
    """Those of the prompt's tokens from the second one on, until they are told with the answer's first token.

    Attributes:
        wanted: they are asked for, and have not been told; so all of the prompt has to be computed.
    """

    def __init__(self, message: GenerationRequest) -> None:
        # What an earlier verifier has committed came with them.
        self.wanted = message.sampling.prompt_logprobs is not None and not message.committed
        self._found: list[TokenLogprobs] = []

    def of_pass(self, tokens: Sequence[int], computed: int, end: int, *, verified: bool) -> tuple[int, ...]:
        """The tokens that a pass over those from ``computed`` to ``end`` gives log-probabilities of.

        Args:
            verified: the pass reaches the last token, after which the answer's first one is chosen.
        """
        return tuple(tokens[computed + 1 : end if verified else end + 1]) if self.wanted else ()

    def add(self, computed: int, found: tuple[TokenLogprobs, ...]) -> None:
        """Keep those of the tokens behind ``computed`` and the next one; some may be known from before a preemption."""
        del self._found[computed:]
        self._found += found

    def take(self) -> tuple[TokenLogprobs, ...]:
        """Those of the whole prompt, once; empty where they are not wanted."""
        self.wanted = False
        found, self._found = tuple(self._found), []
        return found
