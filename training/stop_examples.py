"""Examples for DISCO's classifier: what a draft model said at each token of the target's own text, and whether it was right.

The draft source itself drafts behind known answers, just as it serves, so the inputs are computed by the same code. Each
chain goes on to its first wrong token and a few further. The tokens up to the first wrong ones are every position of the
text once, drafted from the target's own prefix: the paper's examples (appendix D.1). The tokens behind wrong ones follow the
draft model's own text, which the paper's classifier never sees; they are never accepted.

Labels are 0 or 1: whether the token is the target's own, which above temperature 0 is a draw. Soft labels state the chance
instead (``soft_labels``), where a token was drafted from the target's own prefix; behind wrong tokens they are 0, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted, ModelSource
from services.drafter.stopping.classifier import FEATURES, features_of
from services.drafter.stopping.interface import DraftedToken, StopPolicy
from services.drafter.stopping.lengths import PlannedLength
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession
from speculation.replay import AnswerReplay
from speculation.types import EMPTY_TREE, TokenTree

# Answers drafted for at a time.
_AT_ONCE = 16
# Calls in which a source may read a prompt without drafting.
_MOST_CALLS = 1000

Drafting = Callable[[StopPolicy], ModelSource]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownAnswer:
    """A prompt and the target's answer to it.

    Attributes:
        soft: [answer], the labels of tokens drafted from the target's own prefix; None: whether they are the target's.
        kind: of the prompt: the name of its file.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float = 0.0
    kind: str = ""
    soft: NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedChain:
    """One draft behind a part of an answer.

    Attributes:
        position: its first token's index in the answer.
        right: how many of its tokens are the answer's.
        features: [tokens, 13]; behind the ``right`` ones a wrong one and those that follow it, if the answer goes on there.
    """

    position: int
    right: int
    features: NDArray[np.float32]


@dataclass(kw_only=True, slots=True)
class ProbedAnswer:
    """All drafts along an answer of ``length`` tokens: each begins where the one before was corrected.

    Attributes:
        soft, kind: as ``KnownAnswer``'s.
    """

    length: int
    kind: str = ""
    soft: NDArray[np.float32] | None = None
    chains: list[ProbedChain] = field(default_factory=list)


class Probe:
    """Implements ``StopPolicy``: drafts on to ``beyond`` tokens behind the first wrong one, and keeps the inputs.

    Args:
        answers: by prompt.
        longest: most tokens of a draft.
    """

    reads_distribution = True

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], longest: int, beyond: int) -> None:
        self.states: dict[str, ProbeState] = {}
        self._answers = answers
        self._longest = longest
        self._beyond = beyond

    def open(self, message: OpenSession) -> ProbeState:
        answer = self._answers[message.tokens[: message.prompt_length]]
        self.states[message.session_id] = ProbeState(answer, self._longest, self._beyond)
        return self.states[message.session_id]


class ProbeState(PlannedLength):
    """Implements ``StopState``.

    Attributes:
        right: how many tokens of the latest draft are the answer's.
        inputs: of all its tokens.
    """

    def __init__(self, answer: Sequence[int], longest: int, beyond: int) -> None:
        super().__init__(longest)
        self.right = 0
        self.inputs: list[NDArray[np.float32]] = []
        self._answer = answer
        self._beyond = beyond

    @override
    def begin(self, position: int) -> int:
        self.right = 0
        self.inputs = []
        return self.length

    @override
    def more(self, drafted: DraftedToken) -> bool:
        if self.right == len(self.inputs) and self._answer[drafted.position] == drafted.token:
            self.right += 1
        self.inputs.append(features_of(drafted.top, drafted.entropy, drafted.step, drafted.position))
        return len(self.inputs) <= self.right + self._beyond


def probe(
    drafting: Drafting,
    source: str,
    texts: Sequence[KnownAnswer],
    *,
    longest: int,
    beyond: int,
    advance: Callable[[], None] = lambda: None,
) -> list[ProbedAnswer]:
    """Draft along answers, several at a time.

    Args:
        drafting: the draft source under a policy.
        source: its name.
        longest: most tokens of a draft.
        beyond: tokens drafted behind the first wrong one.
        advance: called after every answer.

    Raises:
        ConfigurationError: the source drafts nothing.
    """
    texts = list({text.prompt: text for text in texts if len(text.answer) > 1}.values())
    policy = Probe({text.prompt: text.answer for text in texts}, longest, beyond)
    drafts = drafting(policy)
    found = [ProbedAnswer(length=len(text.answer), soft=text.soft, kind=text.kind) for text in texts]
    waiting = iter(range(len(texts)))
    running: dict[int, _Walk] = {}
    while True:
        for index in _next(waiting, _AT_ONCE - len(running)):
            running[index] = _Walk(str(index), texts[index], source, longest, drafts)
        if not running:
            return found
        batch = [DraftWanted(session=each.session, max_nodes=each.room, states=KnownStates()) for each in running.values()]
        for (index, each), tree in zip(list(running.items()), drafts.draft(batch), strict=True):
            chain = each.take(policy.states[str(index)], tree or EMPTY_TREE)
            if chain is not None:
                found[index].chains.append(chain)
            if each.room < 1:
                each.session.close()
                del running[index]
                advance()


class _Walk:
    """One answer, up to the token that was committed last."""

    def __init__(self, name: str, text: KnownAnswer, source: str, longest: int, drafts: ModelSource) -> None:
        self._text = text
        self._source = source
        self._longest = longest
        self._answer = AnswerReplay(name, (*text.prompt, *text.answer), len(text.prompt), longest)
        self._calls = 0
        self.session = drafts.open(self._answer.opening(sources=(source,), temperature=text.temperature))
        # As in serving, the first token comes with the prompt's pass.
        self.session.observe(self._answer.accept(EMPTY_TREE))

    @property
    def _at(self) -> int:
        return self._answer.length - len(self._text.prompt)

    @property
    def room(self) -> int:
        """Most tokens of the next draft: one token of the answer comes from the target's own pass."""
        return min(self._longest, len(self._text.answer) - self._at - 1)

    def take(self, state: ProbeState, tree: TokenTree) -> ProbedChain | None:
        """The draft that was made, if one was; commits what the target would."""
        if not state.inputs and self._calls < _MOST_CALLS:
            self._calls += 1
            return None
        if not state.inputs:
            raise ConfigurationError(
                f"{self._source} drafts nothing behind a prompt of {len(self._text.prompt)} tokens", about=self._source
            )
        chain = ProbedChain(position=self._at, right=state.right, features=np.stack(state.inputs))
        self.session.observe(self._answer.accept(tree))
        return chain


def _next(waiting: Iterator[int], count: int) -> Iterator[int]:
    for _, index in zip(range(count), waiting, strict=False):
        yield index


@dataclass(frozen=True, kw_only=True, slots=True)
class StopExamples:
    """Inputs and labels.

    Attributes:
        features: [n, 13].
        labels: [n], 1 where the target took the token, else 0; or soft ones.
    """

    features: NDArray[np.float32]
    labels: NDArray[np.float32]


def judged_examples(answers: Sequence[ProbedAnswer]) -> StopExamples:
    """The paper's examples: one token at every position, from the target's own prefix."""
    return _examples(answers, lambda chain: chain.right + 1)


def chain_examples(answers: Sequence[ProbedAnswer]) -> StopExamples:
    """These, and the tokens behind wrong ones, as a classifier meets them that did not stop in time."""
    return _examples(answers, lambda chain: len(chain.features))


def _examples(answers: Sequence[ProbedAnswer], used: Callable[[ProbedChain], int]) -> StopExamples:
    features, labels = [np.zeros((0, len(FEATURES)), np.float32)], [np.zeros(0, np.float32)]
    for answer in answers:
        for chain in answer.chains:
            part = chain.features[: used(chain)]
            features.append(part)
            labels.append(_labels(answer, chain)[: len(part)])
    return StopExamples(features=np.concatenate(features), labels=np.concatenate(labels))


def _labels(answer: ProbedAnswer, chain: ProbedChain) -> NDArray[np.float32]:
    hard = (np.arange(len(chain.features)) < chain.right).astype(np.float32)
    if answer.soft is None:
        return hard
    # The first wrong token was drafted from the target's own prefix, too.
    soft = answer.soft[chain.position : chain.position + chain.right + 1]
    return np.concatenate((soft, hard[len(soft) :]))[: len(hard)]
