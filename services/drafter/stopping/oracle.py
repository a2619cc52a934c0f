"""The best that any policy can do with chains: the oracle of DISCO's section 3, for comparisons on text that is known.

A first run with ``Scout`` drafts to the first wrong token of every step and notes how many were right. In a second run
``Oracle`` drafts exactly these, and nothing where the first token would be wrong. So it wastes no
draft pass, and the target makes the fewest passes that are possible with this draft model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from services.drafter.stopping.interface import DraftedToken
from services.drafter.stopping.lengths import PlannedLength
from speculation.messages import OpenSession

Tokens = tuple[int, ...]


class Scout:
    """Implements ``StopPolicy``: drafts to the first token that is not the text's.

    Attributes:
        lengths: found so far: by prompt, by index in the answer, how many tokens were right.

    Args:
        answers: by prompt.
        longest: most tokens of a draft.
    """

    reads_distribution = False

    def __init__(self, answers: Mapping[Tokens, Sequence[int]], longest: int) -> None:
        self.lengths: dict[Tokens, dict[int, int]] = {}
        self._answers = answers
        self._longest = longest

    def open(self, message: OpenSession) -> ScoutState:
        prompt = message.tokens[: message.prompt_length]
        found = self.lengths.setdefault(prompt, {})
        return ScoutState(self._answers[prompt], self._longest, found)


class ScoutState(PlannedLength):
    """Implements ``StopState``."""

    def __init__(self, answer: Sequence[int], longest: int, found: dict[int, int]) -> None:
        super().__init__(longest)
        self._answer = answer
        self._found = found
        self._position = 0

    @override
    def begin(self, position: int) -> int:
        self._position = position
        self._found[position] = 0
        return self.length

    @override
    def more(self, drafted: DraftedToken) -> bool:
        right = drafted.position < len(self._answer) and self._answer[drafted.position] == drafted.token
        self._found[self._position] += right
        return right


class Oracle:
    """Implements ``StopPolicy``.

    Args:
        lengths: of a ``Scout``.
    """

    reads_distribution = False

    def __init__(self, lengths: Mapping[Tokens, Mapping[int, int]]) -> None:
        self._lengths = lengths

    def open(self, message: OpenSession) -> OracleState:
        return OracleState(self._lengths[message.tokens[: message.prompt_length]])


class OracleState(PlannedLength):
    """Implements ``StopState``."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        super().__init__(0)
        self._lengths = lengths

    @override
    def begin(self, position: int) -> int:
        return self._lengths.get(position, 0)
