"""A fast toy language model, good and bad drafters, and the loop around them; a template for real ones."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
import torch

from services.metrics.registry import DROPPED, Metrics
from services.verifier.choosing.chooser import Chooser
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.origins import Origin
from services.verifier.model.target_port import ColumnRows, Outcome, Prefix, Rows, Sampling, SingleRows, StreamSpec
from speculation.budget import Budget, FixedBudget
from speculation.errors import TargetLost, Unavailable
from speculation.messages import (
    CloseSession,
    Continuation,
    Draft,
    DraftFailure,
    FeatureChunk,
    Finished,
    ForgetTenant,
    GenerationRequest,
    OpenSession,
    Progress,
    RetrievalQuery,
    Retrieved,
    StepReport,
)
from speculation.ports import DraftLink
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import Features, Plan, SamplingParams, TokenTree

VOCAB = 16
EOS = 0


def toy_logits(tokens: Sequence[int], vocab: int = VOCAB) -> torch.Tensor:
    """Next-token logits after ``tokens``, [vocab], float32: some fixed function of the last three."""
    seed = 7
    for token in tokens[-3:]:
        seed = seed * 31 + token + 1
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1.5, vocab).astype(np.float32))


class ToyTarget:
    """Implements ``Target`` by ``toy_logits``. It keeps rows like a real KV cache, so that a wrong ``keep`` is found."""

    vocab_size = VOCAB
    max_model_len = 512
    eos_token_ids = frozenset({EOS})

    def __init__(self, rooms: int = 64, depth: int = 1, rows: int = 1_000_000) -> None:
        self.rooms = rooms
        self.depth = self.processes = depth
        self.rows = rows
        self.granted: dict[str, int] = {}
        self.under_way: deque[Sequence[Rows]] = deque()
        self.most_under_way = 0
        self.recovered = self.beats = 0
        self.lose_next = False
        self.kept: dict[str, list[int]] = {}
        self.fail_next = False
        self.delay_s = 0.0
        self.threads: set[str] = set()
        self.forgotten: list[str] = []
        self._last: dict[str, Rows] = {}
        self._chooser = Chooser(self.eos_token_ids)
        self.choosing_s = 0.0

    def open(
        self, request_id: str, rows: int, prefix: Prefix | None = None, *, sampling: Sampling | None = None, spare: int = 0
    ) -> bool:
        if len(self.kept) >= self.rooms or not self._fits(request_id, rows + spare):
            return False
        self.kept[request_id] = []
        self.granted[request_id] = rows
        self._chooser.open(request_id, sampling)
        return True

    def computed(self, request_id: str) -> int:
        return 0

    def grow(self, request_id: str, rows: int) -> int:
        if not self._fits(request_id, rows):
            return 0
        self.granted[request_id] = max(rows, self.granted[request_id])
        return self.granted[request_id]

    def _fits(self, request_id: str, rows: int) -> bool:
        return sum(self.granted.values()) - self.granted.get(request_id, 0) + rows <= self.rows

    def close(self, request_id: str) -> None:
        self.kept.pop(request_id, None)
        assert not any(rows.request_id == request_id for batch in self.under_way for rows in batch), "closed in mid-pass"
        self._last.pop(request_id, None)
        self.granted.pop(request_id, None)
        self._chooser.close(request_id)

    def begin(self, batch: Sequence[Rows]) -> None:
        self.threads.add(threading.current_thread().name)
        busy = {rows.request_id for other in self.under_way for rows in other}
        assert not busy & {rows.request_id for rows in batch}, "a request is in two passes"
        assert all(self.granted[rows.request_id] >= rows.context + len(rows.tokens) for rows in batch), "beyond its room"
        self.under_way.append(batch)
        self.most_under_way = max(self.most_under_way, len(self.under_way))

    def finish(self) -> Sequence[Outcome]:
        batch = self.under_way.popleft()
        self.threads.add(threading.current_thread().name)
        time.sleep(self.delay_s)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("planted failure")
        if self.lose_next:
            self.lose_next = False
            raise TargetLost("planted loss")
        return self._chooser.outcomes(batch, torch.cat([self._forward(rows) for rows in batch]))

    def _forward(self, rows: Rows) -> torch.Tensor:
        context = self.kept[rows.request_id]
        assert len(context) == rows.context, "the loop and the cache disagree on the length"
        self._last[rows.request_id] = rows
        seen: list[list[int]] = []
        for index, token in enumerate(rows.tokens):
            if index < rows.chain:
                before = seen[index - 1] if index else context
            else:
                parent = rows.parents[index - rows.chain]
                before = seen[rows.chain + parent]
            seen.append([*before, token])
        wanted = seen[len(seen) - rows.logits :] if rows.logits else []
        return torch.stack([self._logits(tokens) for tokens in wanted]) if wanted else torch.empty(0, self.vocab_size)

    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Next-token logits after ``tokens``, [vocab], float32."""
        return toy_logits(tokens)

    def forget(self, tenant: str) -> None:
        self.forgotten.append(tenant)

    def check_layers(self, layers: Sequence[int]) -> None:
        pass

    def streams(self, layers: Sequence[int]) -> StreamSpec | None:
        return None

    def fetch_features(self, asked: Mapping[str, Sequence[int]]) -> None:
        pass

    def features(self, request_id: str, rows: Sequence[int]) -> Features:
        """Two numbers per row and layer: the row's token, and the number of the request's rows in the pass."""
        last = self._last[request_id]
        layers = last.layers or (-1,)
        numbers = [number for row in rows for number in (last.tokens[row], len(last.tokens)) * len(layers)]
        data = struct.pack(f"<{len(numbers)}e", *numbers)
        start = last.context + rows[0]
        return Features(data=data, rows=len(rows), width=2 * len(layers), dtype="float16", start=start, layers=layers)

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None:
        self.threads.add(threading.current_thread().name)
        tokens = self._last[request_id].tokens
        kept = [tokens[row] for row in rows]
        self.kept[request_id] = self.kept[request_id][:context] + kept
        self._chooser.commit(request_id, context, kept)

    def keep_singles(self, batch: SingleRows) -> None:
        for rows in batch:
            self.keep(rows.request_id, rows.context, (0,))

    def keep_paths(self, batch: ColumnRows, paths: Sequence[Sequence[int]]) -> None:
        for rows, path in zip(batch, paths, strict=True):
            self.keep(rows.request_id, rows.context, (0, *[1 + node for node in path]))

    def beat(self) -> None:
        self.beats += 1

    def recover(self) -> None:
        self.kept.clear()
        self.granted.clear()
        self.under_way.clear()
        self._last.clear()
        self._chooser.clear()
        self.recovered += 1

    def shutdown(self) -> None:
        pass


class RandomRetriever:
    """Random continuations, sometimes none, sometimes an error."""

    def __init__(self, seed: int = 0, vocab: int = VOCAB) -> None:
        self.random = random.Random(seed)
        self.vocab = vocab
        self.queries: list[RetrievalQuery] = []

    async def retrieve(self, query: RetrievalQuery) -> Retrieved:
        self.queries.append(query)
        if self.random.random() < 0.1:
            raise Unavailable("no index")
        hits = [self._hit(query) for _ in range(self.random.randrange(4))]
        return Retrieved(continuations=tuple(hits), index_version="any")

    def _hit(self, query: RetrievalQuery) -> Continuation:
        tokens = tuple(self.random.randrange(self.vocab) for _ in range(self.random.randint(1, query.max_length)))
        return Continuation(tokens=tokens, count=self.random.randint(1, 5), match_length=self.random.randint(2, 8))


class RandomDrafter:
    """Drafts random trees. A ``mood`` other than "random" makes it failing, silent, stale, slow, malformed or good."""

    def __init__(self, seed: int = 0, vocab: int = VOCAB, mood: str = "random") -> None:
        self.random = random.Random(seed)
        self.vocab = vocab
        self.mood = mood
        self.sessions: dict[str, list[int]] = {}
        self.sources: dict[str, str] = {}
        self.forgotten: list[str] = []

    async def open(self, message: OpenSession) -> Draft | DraftFailure:
        self.sessions[message.session_id] = list(message.tokens)
        self.sources[message.session_id] = message.sources[0]
        return await self._draft(message.session_id, message.max_nodes)

    async def step(self, message: StepReport) -> Draft | DraftFailure:
        if message.session_id not in self.sessions:
            return DraftFailure(session_id=message.session_id, reason="unknown session", reopen=True)
        self.sessions[message.session_id] += message.committed
        return await self._draft(message.session_id, message.max_nodes)

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        for draft in ():
            yield draft

    def features(self, message: FeatureChunk) -> None:
        pass

    def close(self, message: CloseSession) -> None:
        self.sessions.pop(message.session_id, None)

    async def forget(self, message: ForgetTenant) -> None:
        self.forgotten.append(message.tenant)

    async def _draft(self, session_id: str, max_nodes: int) -> Draft | DraftFailure:
        tokens = self.sessions[session_id]
        name = self.sources[session_id]
        length, tree = len(tokens), random_tree(self.random, max_nodes, self.vocab, name)
        match self.mood:
            case "failing":
                raise RuntimeError("planted failure")
            case "silent":
                return DraftFailure(session_id=session_id, reason="nothing today")
            case "stale":
                tokens, length = tokens[:-1], length - 1
            case "slow":
                await asyncio.sleep(self.random.random() * 0.01)
            case "malformed":
                broken = (self.vocab + 5,) * max(len(tree), 1)
                tree = TokenTree(tokens=broken, parents=(7,) * len(broken), sources=("x",) * len(broken))
            case "good":
                tree = right_tree(tokens, max_nodes, name)
        return Draft(session_id=session_id, base_length=length, base_hash=extend_hash(EMPTY_HASH, tokens), tree=tree)


def random_tree(source: random.Random, max_nodes: int, vocab: int, name: str = "random") -> TokenTree:
    """A tree of random shape and tokens."""
    nodes = source.randint(0, max_nodes)
    return TokenTree(
        tokens=tuple(source.randrange(vocab) for _ in range(nodes)),
        parents=tuple(source.randint(-1, node - 1) for node in range(nodes)),
        sources=(name,) * nodes,
        scores=tuple(source.random() for _ in range(nodes)),
    )


def right_tree(tokens: Sequence[int], depth: int, name: str = "right") -> TokenTree:
    """The toy model's own greedy continuation, as a chain."""
    path: list[int] = []
    for _ in range(depth):
        path.append(int(toy_logits([*tokens, *path]).argmax()))
    return TokenTree(tokens=tuple(path), parents=tuple(range(-1, depth - 1)), sources=(name,) * depth)


def request(name: str, prompt: Sequence[int], plan: Plan | None = None, **sampling: object) -> GenerationRequest:
    """A request; without a ``plan``, one that speculates."""
    return GenerationRequest(
        request_id=name,
        prompt=tuple(prompt),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        plan=plan or Plan(strategy="test", sources=("test",), max_nodes=6),
        tenant="",
    )


PLAIN = Plan(strategy="autoregressive")


def origin(
    link: DraftLink, name: str = "the drafter", *, trusted: bool = True, sources: Sequence[str] | None = None
) -> Origin:
    """An origin of drafts behind ``link``."""
    return Origin(name=name, link=link, trusted=trusted, sources=None if sources is None else frozenset(sources))


@asynccontextmanager
async def decoding(
    target: ToyTarget,
    *links: DraftLink | Origin,
    budget: Budget | None = None,
    metrics: Metrics = DROPPED,
    worker: Executor | None = None,
    **config: object,
) -> AsyncIterator[DecodingLoop]:
    """A running decoding loop with ``links`` as origins of drafts. Without a ``worker``, passes run in a thread."""
    loop = DecodingLoop(
        target,
        [
            link if isinstance(link, Origin) else origin(link, "the drafter" if number == 1 else f"drafter {number}")
            for number, link in enumerate(links, 1)
        ],
        budget or FixedBudget(max_nodes=6),
        LoopConfig(**config),  # type: ignore[arg-type]
        worker or ThreadPoolExecutor(max_workers=1),
        metrics=metrics,
    )
    await loop.start()
    try:
        yield loop
    finally:
        await loop.stop()


async def collect(loop: DecodingLoop, wanted: GenerationRequest) -> tuple[list[int], Finished, list[Progress]]:
    """Run a whole generation; returns its tokens, the terminal message and all steps."""
    steps: list[Progress] = []
    finished: list[Finished] = []
    async for event in loop.generate(wanted):
        if isinstance(event, Finished):
            finished.append(event)
        else:
            assert not finished, "progress after the end"
            steps.append(event)
    assert len(finished) == 1
    return [token for step in steps for token in step.token_ids], finished[0], steps
