"""The router: validates, tokenises and plans a request, sends it to a verifier, and turns the tokens into an answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.api.messages import (
    ClientRequest,
    Completion,
    TextChunk,
    TokenSpelling,
    continues_text,
)
from services.api.model_card import ModelCard, NameableDrafter
from services.fair_threads import FairThreads
from services.metrics.registry import DROPPED, Metrics
from services.model_files.folder import written_at
from services.router.adapter_changes import AdapterChanges
from services.router.answer import Answer
from services.router.comparisons import compared, plan_comparisons
from services.router.config import RouterConfig
from services.router.learning.learning import Learning
from services.router.migration import Migration, describe
from services.router.pauses import Pauses
from services.router.preparing import Preparation
from services.router.reloads import Reloads
from services.router.rules.facts import Facts
from services.router.rules.rule_book import RuleBook
from services.router.strategies import check_default, served
from services.router.token_origins import Origins
from services.router.tokenizer_file import tokenizer_info
from services.router.tokens import Tokens, length_of
from speculation.adapters import check_name
from speculation.errors import InvalidArgument, NotFound, OutriderError, PromptTooLong
from speculation.held_models import HeldModel
from speculation.messages import Finished, ServiceState, VerifierCard
from speculation.ports import VerifierLink
from speculation.reloads import PauseMode, RunningAnswers
from speculation.types import FinishReason

# Tokens that are spelt out in well under a millisecond: no other thread is worth asking.
_FEW = 256
# Seconds for which it is known which adapters there are, or what drafters hold, where that may change.
_CARD_S = 1.0
# Texts that are tokenised at once; a tokeniser's work mostly runs without Python's lock.
_TOKENISING = 3


class RouterService:
    """Implements ``services.api.messages.RouterPort``.

    Args:
        metrics: where it counts migrations; what users see of it is counted in front of it (``ObservedRouter``).
        tokens: the model's tokeniser, where it is loaded already.

    Raises:
        ConfigurationError: the tokeniser cannot be loaded, the default strategy does not exist, or a rule is wrong.
    """

    def __init__(
        self, config: RouterConfig, verifier: VerifierLink, metrics: Metrics = DROPPED, tokens: Tokens | None = None
    ) -> None:
        check_default(config.strategy)
        self._config = config
        self._strategy = config.strategy.with_held(None)
        self._verifier = verifier
        self._tokens = tokens or Tokens(config.model_path, generic_tools=config.generic_tools, thoughts=config.thoughts)
        self._created = written_at(Path(config.model_path))
        self._pool = FairThreads("tokenising", _TOKENISING)
        self._card: VerifierCard | None = None
        self._described_at = 0.0
        self._held: tuple[HeldModel, ...] | None = None
        self._rules = RuleBook(config, metrics)
        self._learning = Learning(config.learning, self._strategy, verifier, metrics) if config.learning.on else None
        self._preparation = Preparation(config, self._tokens, self._rules, self._learning)
        # Answers under way.
        self._open = 0
        self._adapters = AdapterChanges(verifier)
        waits = config.waits
        self._migration = Migration(verifier, config.migration_timeout_s, waits.migration_s, metrics)
        self._reloads = Reloads(verifier, waits.keeping_s, waits.beat_s)
        self._pauses = Pauses(verifier, waits.joining_s)

    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        self._open += 1
        try:
            async with aclosing(self._answer(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._open -= 1

    async def _answer(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        arrived_at = time.perf_counter()
        if not request.request_id:
            request = replace(request, request_id=uuid.uuid4().hex)
        card = await self._describe()
        self._tokens.check_length(request.input, card.max_model_len)
        self._tokens.check_length(request.prediction, card.max_model_len, "prediction")
        size = length_of(request.input) + len(request.prediction)
        planned = plan_comparisons(request, self._strategy)
        prepare = self._preparation.prepare
        prepared = await self._pool.run(lambda: prepare(request, card, self._open), size, request.tenant)
        inner, chosen = prepared.request, prepared.chosen
        before = inner.prompt if continues_text(request) else ()

        def begun() -> Answer:
            detokenizer = self._tokens.detokenizer(
                special=not request.skip_special_tokens, after=before, hidden=self._preparation.gap_ends(request)
            )
            named = self._tokens.named(request.sampling.stop)
            origins = None if request.report == "none" else Origins(self._tokens)
            return Answer(inner, request.request_id, detokenizer, arrived_at, origins, named)

        answer = begun()
        reason, said = FinishReason.STOP, list[int]()
        async with aclosing(self._migration.generate(inner)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    reason = event.reason
                    break
                if event.restarted:
                    answer = begun()
                    said.clear()
                chunk = answer.add(event)
                if planned or chosen is not None:
                    said += chunk.token_ids
                yield chunk
                if answer.stop_string is not None:
                    break
        if rest := answer.rest():
            yield TextChunk(text=rest, token_ids=())
        learnt = "" if chosen is None else chosen.choice.why
        completion = answer.complete(reason, request.model or self._config.names_of(card)[0], prepared.rule, learnt)
        if planned:
            completion = replace(completion, comparisons=await compared(self._verifier, inner, said, planned))
        if chosen is not None and self._learning is not None:
            self._learning.answered(chosen, inner, said, completion.stats, completion.timing.total_s)
        yield completion

    async def models(self, tenant: str | None = None) -> list[ModelCard]:
        card, strategy = await self._describe(), self._strategy.for_tenant(tenant)
        return [
            ModelCard(
                name=self._config.names_of(card)[0],
                aliases=self._config.names_of(card)[1:],
                max_model_len=card.max_model_len,
                vocab_size=card.vocab_size,
                strategies=tuple(sorted(served(strategy))),
                default_strategy=strategy.strategy,
                bit_exact=card.bit_exact,
                defaults=card.defaults,
                processors=card.processors,
                arithmetic=card.arithmetic,
                chats=self._tokens.has_chat_template,
                tool_format=self._tokens.conversations.tool_format,
                thoughts=self._tokens.conversations.thoughts,
                reads_thoughts=self._tokens.conversations.reads_thoughts,
                named_roles=self._tokens.conversations.named_roles,
                special_tokens=self._tokens.special_names,
                added_tokens=self._tokens.added_names,
                late_system=self._tokens.conversations.late_system,
                template_options=self._tokens.conversations.options,
                infills=self._tokens.infill is not None,
                adapters=card.adapters,
                weights=card.weights,
                created=self._created,
                drafters=tuple(NameableDrafter(name=each.name, strategy=each.kind) for each in strategy.trained),
            )
        ]

    async def forget(self, tenant: str) -> None:
        self._preparation.forget()
        await self._verifier.forget(tenant)
        if self._learning is not None:
            await self._learning.forget(tenant)

    async def stop(self) -> None:
        """End what runs beside requests. Requests are answered all the same."""
        if self._learning is not None:
            await self._learning.stop()

    async def load_adapter(self, name: str, folder: str) -> None:
        check_name(name, self._config.names_of(await self._describe()))
        await self._adapters.load(name, folder)
        self._card = None

    async def unload_adapter(self, name: str) -> None:
        adapters = self._learn(await describe(self._verifier)).adapters
        if name not in adapters:
            raise NotFound("lora_name", name, ", ".join(adapters) or "unset: no adapter is loaded")
        await self._adapters.unload(name)
        self._card = None

    async def reload(self, folder: str, running: RunningAnswers, within_s: float) -> tuple[str, ...]:
        await self._reloads.reload(folder, running, within_s)
        self._card = None
        trained = sorted(drafter.name for drafter in self._strategy.trained)
        note = (
            f"drafters that were trained for the weights before ({', '.join(trained)}) go on: they can only cost speed; "
            "`outrider train canary` tries a head on the new ones"
        )
        return (note,) if trained else ()

    async def pause(self, mode: PauseMode, within_s: float) -> None:
        await self._pauses.pause(mode, within_s)

    async def resume(self) -> None:
        await self._pauses.resume()

    async def paused(self) -> bool:
        return await self._pauses.paused()

    async def tokenize(self, request: ClientRequest) -> tuple[int, ...]:
        most, size = (await self._describe()).max_model_len, length_of(request.input)
        self._tokens.check_length(request.input, most)
        if request.infill is not None:
            around = "".join((request.infill.suffix, *(text for file in request.infill.files for text in file)))
            self._tokens.check_length(around, most, "suffix")
            size += len(around)
        return await self._pool.run(lambda: self._preparation.encode(request), size, request.tenant)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        card = await self._describe()
        size, most = card.vocab_size, card.max_model_len
        if len(token_ids) > most:
            allowed = f"at most {most} tokens (this model's maximum context length is {most} tokens)"
            raise PromptTooLong("tokens", f"{len(token_ids)} tokens", allowed)
        wrong = next((token for token in token_ids if not 0 <= token < size), None)
        if wrong is not None:
            raise InvalidArgument("tokens", wrong, f"token ids from 0 to {size - 1}")
        return await self._pool.run(lambda: self._tokens.decode(token_ids), len(token_ids))

    async def spell(self, token_ids: Sequence[int]) -> tuple[TokenSpelling, ...]:
        if len(token_ids) <= _FEW:
            return self._tokens.spell(token_ids)
        return await self._pool.run(lambda: self._tokens.spell(token_ids), len(token_ids))

    async def tokenizer_info(self) -> Mapping[str, Any]:
        return await asyncio.to_thread(tokenizer_info, Path(self._config.model_path))

    async def ready(self) -> bool:
        try:
            card = self._learn(await describe(self._verifier))
        except OutriderError:
            return False
        self._pauses.seen(card)
        return True

    async def service_state(self) -> ServiceState:
        return await self._verifier.service_state()

    async def _describe(self) -> VerifierCard:
        # While a verifier lives, only its load changes, which is not needed here, its adapters where some may be loaded, and
        # what its drafters hold where they tell.
        if self._card is None or self._is_old():
            return self._learn(await describe(self._verifier))
        return self._card

    def _is_old(self) -> bool:
        changes = self._config.loads_adapters or self._config.strategy.registers
        return changes and time.perf_counter() > self._described_at + _CARD_S

    def _learn(self, card: VerifierCard) -> VerifierCard:
        """Go on by what a verifier says now."""
        self._card, self._described_at = card, time.perf_counter()
        if card.held != self._held and self._config.strategy.registers:
            self._held, self._strategy = card.held, self._config.strategy.with_held(card.held)
            self._rules.follow(self._strategy)
            if self._learning is not None:
                self._learning.follow(self._strategy)
        return card

    async def facts(self, request: ClientRequest) -> Facts:
        """What rules may ask of a request.

        Raises:
            OutriderError: the request cannot be read; names the field.
        """
        card = await self._describe()
        self._tokens.check_length(request.input, card.max_model_len)
        size = length_of(request.input)
        return await self._pool.run(lambda: self._preparation.facts(request, card, self._open), size, request.tenant)
