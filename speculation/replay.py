"""Replays a known answer with other drafts, without the target, and counts the passes that they would have taken.

Whatever is drafted, the target writes the same text. So the text itself says how much of a tree is accepted.
"""

from __future__ import annotations

from speculation.acceptance import StopRule, walk
from speculation.messages import OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import path_to
from speculation.types import TokenTree


class AnswerReplay:
    """A prompt and its answer, and how much of the answer is committed: at first nothing.

    A draft of three tokens that has two of them right takes a pass, which also brings the token after them:

    >>> from speculation.tree import chain
    >>> answer = AnswerReplay("r", (1, 2, 3, 4, 5, 6), prompt_length=2, max_nodes=8)
    >>> answer.accept(chain([3, 4, 9], "suffix")).committed, answer.over
    ((3, 4, 5), False)

    Attributes:
        length: tokens committed, those of the prompt included.
    """

    def __init__(self, name: str, tokens: tuple[int, ...], prompt_length: int, max_nodes: int) -> None:
        self.length = prompt_length
        self._name = name
        self._tokens = tokens
        self._nodes = max_nodes
        self._hash = extend_hash(EMPTY_HASH, tokens[:prompt_length])

    @property
    def over(self) -> bool:
        """Whether all is committed."""
        return self.length >= len(self._tokens)

    def opening(
        self,
        *,
        sources: tuple[str, ...] = (),
        tenant: str | None = None,
        temperature: float = 0.0,
        prediction: tuple[int, ...] = (),
    ) -> OpenSession:
        """The message that starts its session."""
        return OpenSession(
            session_id=self._name,
            tokens=self._tokens[: self.length],
            prompt_length=self.length,
            sources=sources,
            max_nodes=self._nodes,
            temperature=temperature,
            tenant=tenant,
            prediction=prediction,
        )

    def accept(self, tree: TokenTree, *, min_probability: float = 0.0) -> StepReport:
        """Commit what a pass over ``tree`` would, by the acceptance rule of serving; what the drafter is told of it.

        Args:
            min_probability: as in ``StepReport``.
        """
        # What is left is not copied: of a long answer that would be most of its replay's time.
        stop = StopRule(stop_token_ids=frozenset(), generated=0, room=len(self._tokens) - self.length)
        accepted = walk(tree, lambda node: self._tokens[self.length + len(path_to(tree, node))], stop)
        self.length += len(accepted.tokens)
        self._hash = extend_hash(self._hash, accepted.tokens)
        return StepReport(
            session_id=self._name,
            committed=accepted.tokens,
            length=self.length,
            prefix_hash=self._hash,
            accepted_path=accepted.path,
            max_nodes=self._nodes,
            min_probability=min_probability,
        )
