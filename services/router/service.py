"""The router: validates, tokenises and plans a request, sends it to a verifier, and turns the tokens into an answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace

from services.client_api import ChatMessage, ClientRequest, Completion, ModelCard, TextChunk
from services.router.answer import Answer
from services.router.config import RouterConfig
from services.router.sampling import complete_sampling
from services.router.strategies import check_default, make_plan, served
from services.router.tokens import Tokens
from speculation import limits
from speculation.errors import Internal, InvalidArgument, NotFound, OutriderError, PromptTooLong, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard, log_name
from speculation.ports import VerifierPort
from speculation.types import FinishReason

log = logging.getLogger(__name__)

# Seconds before each further attempt after a verifier has become unavailable.
_MIGRATION_DELAYS_S = (0.1, 1.0, 3.0)


class RouterService:
    """Implements ``services.client_api.RouterPort``.

    Raises:
        ConfigurationError: the tokeniser cannot be loaded, or the default strategy does not exist.
    """

    def __init__(self, config: RouterConfig, verifier: VerifierPort) -> None:
        check_default(config.strategy)
        self._config = config
        self._verifier = verifier
        self._tokens = Tokens(config.model_path)
        self._card: VerifierCard | None = None

    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        arrived_at = time.perf_counter()
        if not request.request_id:
            request = replace(request, request_id=uuid.uuid4().hex)
        card = await self._describe()
        # Tokenising a long text takes time: in a thread, it does not delay other requests.
        inner = await asyncio.to_thread(self._prepare, request, card)
        answer = Answer(inner, request.request_id, self._tokens.detokenizer(), arrived_at)
        events = self._verify(inner)
        try:
            async for event in events:
                if isinstance(event, Finished):
                    if rest := answer.rest():
                        yield TextChunk(text=rest, token_ids=())
                    yield answer.complete(event.reason, card.model)
                    return
                yield answer.add(event)
                if answer.stop_string is not None:
                    yield answer.complete(FinishReason.STOP, card.model)
                    return
        finally:
            await events.aclose()

    async def _verify(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """A verifier's events. If it dies, another one continues after the committed tokens: same seed, same tokens."""
        committed: list[int] = []
        for attempt, delay_s in enumerate((*_MIGRATION_DELAYS_S, None)):
            # A new id for each attempt: the verifier may be alive and still hold the abandoned attempt.
            name = f"{request.request_id}.{attempt}"
            events = self._verifier.generate(replace(request, request_id=name, committed=tuple(committed)))
            try:
                async for event in events:
                    if isinstance(event, Progress):
                        committed += event.token_ids
                    yield event
                    if isinstance(event, Finished):
                        return
                raise Internal("the verifier ended without a result")
            except Unavailable as error:
                if delay_s is None:
                    raise
                name = log_name(request.request_id, request.traceparent)
                log.warning("request %s is retried after %d tokens: %s", name, len(committed), error)
            finally:
                await events.aclose()
            await asyncio.sleep(delay_s)

    async def models(self) -> list[ModelCard]:
        card, strategy = await self._describe(), self._config.strategy
        return [
            ModelCard(
                name=card.model,
                max_model_len=card.max_model_len,
                vocab_size=card.vocab_size,
                strategies=tuple(sorted(served(retrieval=strategy.retrieval, semantic=strategy.semantic))),
                default_strategy=strategy.strategy,
                bit_exact=card.bit_exact,
                defaults=card.defaults,
                processors=card.processors,
            )
        ]

    async def forget(self, tenant: str) -> None:
        await self._verifier.forget(tenant)

    async def ready(self) -> bool:
        try:
            self._card = await self._ask()
        except OutriderError:
            return False
        return True

    async def _describe(self) -> VerifierCard:
        # Only the load changes while a verifier lives, and it is not needed here.
        if self._card is None:
            self._card = await self._ask()
        return self._card

    async def _ask(self) -> VerifierCard:
        try:
            async with asyncio.timeout(limits.DESCRIBE_S):
                return await self._verifier.describe()
        except TimeoutError:
            raise Unavailable(f"the verifier has not answered for {limits.DESCRIBE_S:g} s; try again") from None

    def _prepare(self, request: ClientRequest, card: VerifierCard) -> GenerationRequest:
        if request.model is not None and request.model != card.model:
            raise NotFound("model", request.model, card.model)
        plan = make_plan(request, self._config.strategy)
        prompt = self._encode(request.input)
        if len(prompt) >= card.max_model_len:
            most = card.max_model_len - 1
            raise PromptTooLong(
                "prompt", f"{len(prompt)} tokens", f"at most {most} tokens (max_model_len is {card.max_model_len})"
            )
        # Users may choose the same request id, but ids must be unique at a verifier.
        name = f"{request.request_id}.{secrets.token_hex(4)}"
        log.info("request %s: %d tokens, strategy %s", log_name(name, request.traceparent), len(prompt), plan.strategy)
        return GenerationRequest(
            request_id=name,
            prompt=prompt,
            sampling=complete_sampling(request.sampling, card, len(prompt)),
            plan=plan,
            tenant=request.tenant,
            traceparent=request.traceparent,
        )

    def _encode(self, source: str | tuple[ChatMessage, ...] | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(source, str):
            return self._tokens.encode(source)
        messages = tuple(entry for entry in source if isinstance(entry, ChatMessage))
        if messages:
            return self._tokens.encode_chat(messages)
        ids = tuple(entry for entry in source if isinstance(entry, int))
        if not ids:
            raise InvalidArgument("prompt", "empty", "at least one token, character or message")
        return ids
