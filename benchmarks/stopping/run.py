"""Compares policies for the length of drafts: real passes of the draft model and of the target, one request at a time.

All policies draft for the same requests by turns, and the target checks every chain. Under ``acceptance: walk`` no draft
changes the text, so all policies see the same positions; that the text stayed the same is checked. The oracle's lengths come
from a run that is not measured, see ``services.drafter.stopping.oracle``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.bench.records import Request
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted, ModelSource
from services.drafter.stopping.interface import DraftedToken, StopPolicy, StopState
from services.drafter.stopping.oracle import Oracle, Scout
from services.verifier.model.target_port import Prefix, Rows, Sampling, Target
from speculation.acceptance import StopRule, stop_token_ids, walk
from speculation.errors import ConfigurationError
from speculation.messages import DraftNoise, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import EMPTY_TREE, SamplingParams, TokenTree

PLAIN = "plain"
ORACLE = "oracle"
# Prompt tokens in one pass.
_CHUNK = 256

Score = Callable[[DraftedToken], float]
# A source with this policy; the draft model behind it may be shared.
Drafting = Callable[[StopPolicy], ModelSource]


@dataclass(frozen=True, kw_only=True, slots=True)
class StopContestant:
    """A policy in the comparison.

    Attributes:
        make: makes the policy anew for every repeat; None: plain decoding.
        score: what it decides by, higher for tokens that it trusts; None: it does not look at tokens.
    """

    name: str
    make: Callable[[], StopPolicy] | None
    score: Score | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainStep:
    """One draft and the pass that checked it.

    Attributes:
        position: tokens of the answer before it.
        cut: the draft ended because the answer has no more room, not by the policy.
        scores: of the drafted tokens.
    """

    position: int
    drafted: int
    accepted: int
    cut: bool
    draft_s: float
    target_s: float
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainRun:
    """One answer. ``seconds``: from its first token to its last."""

    contestant: str
    request: str
    task: str
    repeat: int
    tokens: tuple[int, ...]
    steps: tuple[ChainStep, ...]
    seconds: float


class Watched:
    """Implements ``StopPolicy`` by another one, and keeps what it was asked about the latest draft."""

    def __init__(self, policy: StopPolicy) -> None:
        self.asked: list[DraftedToken] = []
        self._policy = policy

    @property
    def reads_distribution(self) -> bool:
        return self._policy.reads_distribution

    def open(self, message: OpenSession) -> StopState:
        return _WatchedState(self._policy.open(message), self.asked)


class _WatchedState:
    def __init__(self, state: StopState, asked: list[DraftedToken]) -> None:
        self._state = state
        self._asked = asked
        self.observe = state.observe

    def begin(self, position: int) -> int:
        self._asked.clear()
        return self._state.begin(position)

    def more(self, drafted: DraftedToken) -> bool:
        self._asked.append(drafted)
        return self._state.more(drafted)


class ChainDecoder:
    """Speculative decoding in its simplest form: draft, check, commit.

    Args:
        longest: most tokens of a draft.
    """

    def __init__(self, target: Target, drafting: Drafting, source: str, params: SamplingParams, longest: int) -> None:
        self._target = target
        self._drafting = drafting
        self._source = source
        self._params = params
        self._longest = longest

    def source(self, policy: StopPolicy | None) -> tuple[ModelSource, Watched] | None:
        """A source that drafts under a policy; None for plain decoding."""
        if policy is None:
            return None
        watched = Watched(policy)
        return self._drafting(watched), watched

    def answer(
        self, request: Request, source: tuple[ModelSource, Watched] | None, contestant: StopContestant, repeat: int = 0
    ) -> ChainRun:
        """Decode one request.

        Raises:
            ConfigurationError: the context does not hold its prompt and answer.
        """
        params = replace(self._params, seed=request.seed)
        room = params.max_tokens
        if len(request.prompt) + room > self._target.max_model_len:
            raise ConfigurationError(
                f"prompt {request.id}: its {len(request.prompt)} tokens and --max-tokens {room} exceed "
                f"{self._target.max_model_len}, the longest context here; leave it out, or lower --max-tokens",
                about=f"prompt {request.id}",
            )
        sampling = Sampling(params=params, prompt_length=len(request.prompt))
        self._target.open(_SESSION, len(request.prompt) + room, Prefix(tokens=request.prompt), sampling=sampling)
        try:
            return _Answer(self._target, self._source, self._longest, request, params).run(source, contestant, repeat)
        finally:
            self._target.close(_SESSION)


_SESSION = "stopping"


class _Answer:
    def __init__(self, target: Target, source: str, longest: int, request: Request, params: SamplingParams) -> None:
        self._target = target
        self._source = source
        self._longest = longest
        self._request = request
        self._params = params
        self._stops = stop_token_ids(params, target.eos_token_ids)
        self._tokens = list(request.prompt)
        self._hash = EMPTY_HASH

    def run(self, source: tuple[ModelSource, Watched] | None, contestant: StopContestant, repeat: int) -> ChainRun:
        prompt, room = len(self._request.prompt), self._params.max_tokens
        steps = []
        ended = self._read_prompt()
        session = None if source is None else source[0].open(self._opening())
        start = time.perf_counter()
        while not ended:
            generated = len(self._tokens) - prompt
            most = min(self._longest, room - generated - 1)
            tree, began = EMPTY_TREE, time.perf_counter()
            if source is not None and session is not None and most > 0:
                # The answer's first token came with the prompt's pass.
                wanted = DraftWanted(session=session, max_nodes=most, states=KnownStates())
                tree = source[0].draft([wanted])[0] or EMPTY_TREE
            drafted_at = time.perf_counter()
            accepted, ended = self._check(tree)
            done = time.perf_counter()
            if session is not None:
                session.observe(self._report(accepted, generated))
            asked = source[1].asked if source is not None and tree.tokens else []
            steps.append(
                ChainStep(
                    position=generated,
                    drafted=len(tree),
                    accepted=accepted,
                    cut=len(tree) == most < self._longest,
                    draft_s=drafted_at - began,
                    target_s=done - drafted_at,
                    scores=tuple(map(contestant.score, asked)) if contestant.score else (),
                )
            )
        seconds = time.perf_counter() - start
        if session is not None:
            session.close()
        return ChainRun(
            contestant=contestant.name,
            request=self._request.id,
            task=self._request.task,
            repeat=repeat,
            tokens=tuple(self._tokens[prompt:]),
            steps=tuple(steps),
            seconds=seconds,
        )

    def _opening(self) -> OpenSession:
        params = self._params
        noise = DraftNoise(seed=params.seed, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        return OpenSession(
            session_id=_SESSION,
            tokens=tuple(self._tokens),
            prompt_length=len(self._request.prompt),
            sources=(self._source,),
            max_nodes=self._longest,
            temperature=params.temperature,
            noise=noise if params.temperature > 0 else None,
        )

    def _read_prompt(self) -> bool:
        """Compute the prompt and commit the first token. Returns whether it is the last one."""
        prompt = self._request.prompt
        for begin in range(0, len(prompt), _CHUNK):
            chunk = prompt[begin : begin + _CHUNK]
            last = begin + len(chunk) == len(prompt)
            self._target.begin([Rows(request_id=_SESSION, context=begin, tokens=chunk, logits=int(last))])
            outcome = self._target.finish()[0]
            self._target.keep(_SESSION, begin, range(len(chunk)))
        if outcome.error is not None:
            raise outcome.error
        return self._commit(EMPTY_TREE, outcome.choices)[1]

    def _check(self, tree: TokenTree) -> tuple[int, bool]:
        """Let the target check a draft, and commit. Returns how many tokens it accepted, and whether the answer ended."""
        context = len(self._tokens) - 1
        tokens = (self._tokens[-1], *tree.tokens)
        rows = Rows(request_id=_SESSION, context=context, tokens=tokens, parents=tree.parents, logits=len(tokens))
        self._target.begin([rows])
        outcome = self._target.finish()[0]
        if outcome.error is not None:
            raise outcome.error
        path, ended = self._commit(tree, outcome.choices)
        self._target.keep(_SESSION, context, [0, *(node + 1 for node in path)])
        return len(path), ended

    def _commit(self, tree: TokenTree, choices: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        generated = len(self._tokens) - len(self._request.prompt)
        rule = StopRule(stop_token_ids=self._stops, generated=generated, room=self._params.max_tokens)
        accepted = walk(tree, lambda node: choices[node + 1], rule)
        self._tokens += accepted.tokens
        return accepted.path, accepted.finish_reason is not None

    def _report(self, accepted: int, generated: int) -> StepReport:
        committed = tuple(self._tokens[len(self._request.prompt) + generated :])
        self._hash = extend_hash(self._hash, committed)
        return StepReport(
            session_id=_SESSION,
            committed=committed,
            length=len(self._tokens),
            prefix_hash=self._hash,
            accepted_path=tuple(range(accepted)),
            max_nodes=self._longest,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything that was measured. ``oracle``: by request, the oracle's length at each index of the answer."""

    runs: tuple[ChainRun, ...]
    oracle: dict[str, dict[int, int]]
    changed: tuple[str, ...]


def compare_policies(
    decoder: ChainDecoder,
    requests: Sequence[Request],
    contestants: Sequence[StopContestant],
    repeats: int,
    longest: int,
    advance: Callable[[], None] = lambda: None,
) -> Comparison:
    """Let plain decoding, all contestants and the oracle answer all requests, by turns.

    Every contestant's policy begins anew in every repeat.

    Raises:
        ConfigurationError: two requests have the same prompt, by which the oracle tells them apart.
    """
    if len({request.prompt for request in requests}) < len(requests):
        raise ConfigurationError("two prompts are the same: leave one out", about="--prompts")
    plain = StopContestant(name=PLAIN, make=None)
    answers = {request.prompt: decoder.answer(request, None, plain).tokens for request in requests}
    scout = Scout(answers, longest)
    scouting = decoder.source(scout)
    for request in requests:
        decoder.answer(request, scouting, StopContestant(name="scout", make=None))
    everyone = [plain, *contestants, StopContestant(name=ORACLE, make=lambda: Oracle(scout.lengths))]
    runs = []
    for repeat in range(repeats):
        sources = [decoder.source(each.make() if each.make else None) for each in everyone]
        for number, request in enumerate(requests):
            for each in range(len(everyone)):
                at = (each + number + repeat) % len(everyone)
                runs.append(decoder.answer(request, sources[at], everyone[at], repeat))
                advance()
    expected = {request.id: answers[request.prompt] for request in requests}
    changed = {run.contestant for run in runs if run.tokens != expected[run.request]}
    lengths = {request.id: _everywhere(scout.lengths[request.prompt], longest) for request in requests}
    return Comparison(runs=tuple(runs), oracle=lengths, changed=tuple(sorted(changed)))


def _everywhere(found: dict[int, int], longest: int) -> dict[int, int]:
    """The oracle's length at every index, from those where a step began: inside a right draft it is what is left of it."""
    return {
        position + within: length - within
        for position, length in found.items()
        for within in range(length + (length < longest))
    }
