"""A router that says what it is told to, one byte at a time or in other pieces."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from services.api.messages import ChatMessage, ClientRequest, Completion, TextChunk, Timing, TokenSpelling
from services.api.model_card import ModelCard
from speculation.errors import OutriderError
from speculation.messages import ServiceState
from speculation.types import FinishReason, SpeculationStats, TokenLogprobs
from tests.servers.router_stub import RouterStub

CARD = ModelCard(
    name="scripted", max_model_len=4096, vocab_size=256, strategies=("autoregressive",), default_strategy="autoregressive",
    bit_exact=True, tool_format="hermes",
)  # fmt: skip


class ScriptedRouter(RouterStub):
    """Tokens are bytes; the text of a conversation is that of its messages.

    Attributes:
        pieces: characters of each chunk of the answer.
        bulky: each chunk is one token.
        forever: the answer does not end.
        fails: raised after so many chunks.
        waits: seconds before each chunk.
        asked: the requests that came.
        rendered: those for the tokens of a conversation.
        left: how many of them were left before their end.
        reason: why an answer ends.
        state: of the service; ``states_asked``: how often it was asked for.
    """

    def __init__(self, text: str = "", pieces: int = 1) -> None:
        self.text = text
        self.pieces = pieces
        self.card = CARD
        self.fails: tuple[int, OutriderError] | None = None
        self.waits = 0.0
        self.is_ready = True
        self.asked: list[ClientRequest] = []
        self.rendered: list[ClientRequest] = []
        self.left = 0
        self.forever = False
        self.bulky = False
        self.reason = FinishReason.STOP
        self.state = ServiceState()
        self.states_asked = 0

    @override
    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        self.asked.append(request)
        ended = False
        try:
            shown = 0
            while True:
                for number, piece in enumerate(self._pieces()):
                    if self.fails is not None and number == self.fails[0]:
                        ended = True
                        raise self.fails[1]
                    await asyncio.sleep(self.waits)
                    if (token := self.card.special_tokens.get(piece)) is not None:
                        yield TextChunk(text="", token_ids=(token,), text_ends=(shown,))
                        continue
                    yield self._chunk(request, piece, shown)
                    shown += len(piece)
                if not self.forever:
                    break
            ended = True
            yield self._completion(request, shown)
        finally:
            self.left += not ended

    def _pieces(self) -> Iterator[str]:
        """Pieces of the text. The names of special tokens are tokens."""
        names = "|".join(map(re.escape, self.card.special_tokens))
        for part in re.split(f"({names})", self.text) if names else [self.text]:
            size = max(1, len(part)) if part in self.card.special_tokens else self.pieces
            yield from (part[start : start + size] for start in range(0, len(part), size))

    def _chunk(self, request: ClientRequest, piece: str, shown: int) -> TextChunk:
        ids, ends = list[int](), list[int]()
        for index, char in enumerate(piece):
            data = char.encode()
            ids += data
            ends += [shown + index] * (len(data) - 1) + [shown + index + 1]
        if self.bulky:
            ids, ends = ids[:1], ends[-1:]
        logprobs = tuple(TokenLogprobs(token_id=id, logprob=-0.5, top_ids=(id,), top_logprobs=(-0.5,)) for id in ids)
        wanted = request.sampling.logprobs is not None
        return TextChunk(text=piece, token_ids=tuple(ids), text_ends=tuple(ends), logprobs=logprobs if wanted else ())

    def _completion(self, request: ClientRequest, shown: int) -> Completion:
        assert isinstance(request.input, tuple)
        prompt = tuple(id for id in request.input if isinstance(id, int))
        return Completion(
            request_id=request.request_id, finish_reason=self.reason, stop=None, prompt_token_ids=prompt,
            completion_tokens=shown, cached_tokens=3, seed=request.sampling.seed or 0, model=self.card.name,
            strategy="autoregressive", stats=SpeculationStats(),
            timing=Timing(queue_s=0.0, time_to_first_token_s=0.1, total_s=0.2),
        )  # fmt: skip

    @override
    async def models(self, tenant: str | None = None) -> list[ModelCard]:
        return [self.card]

    def with_card(self, **changes: object) -> ScriptedRouter:
        self.card = replace(self.card, **changes)  # type: ignore[arg-type]
        return self

    @override
    async def forget(self, tenant: str) -> None:
        pass

    @override
    async def tokenize(self, request: ClientRequest) -> tuple[int, ...]:
        source = request.input
        if isinstance(source, str):
            return tuple(source.encode())
        messages = [entry.content for entry in source if isinstance(entry, ChatMessage)]
        if messages:
            self.rendered.append(request)
        return tuple("\n".join(messages).encode() or b" ") if messages else tuple(id for id in source if isinstance(id, int))

    @override
    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    @override
    async def spell(self, token_ids: Sequence[int]) -> tuple[TokenSpelling, ...]:
        return tuple(TokenSpelling(data=bytes([id]), special=False) for id in token_ids)

    @override
    async def tokenizer_info(self) -> Mapping[str, Any]:
        return {"tokenizer_class": "Scripted"}

    @override
    async def ready(self) -> bool:
        return self.is_ready

    @override
    async def service_state(self) -> ServiceState:
        self.states_asked += 1
        return self.state
