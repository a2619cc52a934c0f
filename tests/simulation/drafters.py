"""Drafters that are no services of ours: one that knows the target's tokens, and one that lies in every way a draft can."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from typing_extensions import override

from speculation.messages import CloseSession, Draft, DraftFailure, FeatureChunk, ForgetTenant, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import SamplingParams, TokenTree
from tests.simulation.law import LETTERS, plain_answer

_LIES = ("random", "stale", "foreign", "malformed", "failing", "reopen", "ahead", "unready", "raises")


class KnowingDrafter:
    """Implements ``Drafter``: drafts what the target will say, if it is asked nicely: greedily, without rules.

    Attributes:
        sessions: the tokens of each.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, list[int]] = {}
        self.asked: dict[str, OpenSession] = {}

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        self.sessions[message.session_id] = list(message.tokens)
        self.asked[message.session_id] = message
        return self.draft(message.session_id, message.max_nodes)

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        tokens = self.sessions.get(message.session_id)
        if tokens is None or len(tokens) + len(message.committed) != message.length:
            return DraftFailure(session_id=message.session_id, reason="a step was missed", reopen=True)
        tokens += message.committed
        return self.draft(message.session_id, message.max_nodes)

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        for draft in ():
            yield draft

    def features(self, message: FeatureChunk) -> None:
        pass

    def close(self, message: CloseSession) -> None:
        self.sessions.pop(message.session_id, None)
        self.asked.pop(message.session_id, None)

    async def forget(self, message: ForgetTenant) -> None:
        for name in [name for name, asked in self.asked.items() if asked.tenant == message.tenant]:
            self.close(CloseSession(session_id=name))

    def draft(self, name: str, max_nodes: int) -> Draft | DraftFailure | None:
        """What the target says next; after its first wrong token, anything."""
        tokens, asked = self.sessions[name], self.asked[name]
        noise = asked.noise
        params = SamplingParams(temperature=asked.temperature, seed=0 if noise is None else noise.seed, ignore_eos=True)
        return _draft(name, tokens, _chain(plain_answer(tokens, params, min(4, max_nodes)), asked.sources[0]))


class HostileDrafter(KnowingDrafter):
    """Lies: each time in another way."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    @override
    def draft(self, name: str, max_nodes: int) -> Draft | DraftFailure | None:
        tokens, source, drawn = self.sessions[name], self.asked[name].sources[0], self._random
        honest = super().draft(name, max_nodes)
        assert isinstance(honest, Draft)
        lie = drawn.choice(_LIES)
        match lie:
            case "random":
                return replace(honest, tree=_random_tree(drawn, max_nodes, source))
            case "stale":
                return _draft(name, tokens[:-2] or tokens, honest.tree)
            case "foreign":
                return replace(honest, session_id=drawn.choice(list(self.sessions)), base_hash=drawn.getrandbits(64))
            case "malformed":
                wrong = (drawn.choice((-1, 3, 1 << 20)),) * 3
                return replace(honest, tree=TokenTree(tokens=wrong, parents=(7, -3, 1), sources=("x",) * 3))
            case "failing":
                return DraftFailure(session_id=name, reason="not today")
            case "reopen":
                return DraftFailure(session_id=name, reason="lost", reopen=True)
            case "ahead":
                return replace(honest, assumed=honest.tree.tokens[:2], tree=_random_tree(drawn, max_nodes, source))
            case "unready":
                return replace(honest, unready=True, more=True, group="slow", drafting_s=1e300)
        raise RuntimeError("a drafter that fails")


def _draft(name: str, tokens: Sequence[int], tree: TokenTree) -> Draft:
    return Draft(session_id=name, base_length=len(tokens), base_hash=extend_hash(EMPTY_HASH, tokens), tree=tree)


def _chain(tokens: Sequence[int], source: str) -> TokenTree:
    count = len(tokens)
    return TokenTree(tokens=tuple(tokens), parents=tuple(range(-1, count - 1)), sources=(source,) * count)


def _random_tree(drawn: random.Random, most: int, source: str) -> TokenTree:
    count = drawn.randint(0, min(6, most))
    return TokenTree(
        tokens=tuple(drawn.choice(LETTERS) for _ in range(count)),
        parents=tuple(drawn.randint(-1, node - 1) for node in range(count)),
        sources=(source,) * count,
        scores=tuple(drawn.random() for _ in range(count)),
    )
