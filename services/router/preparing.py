"""Makes of a user's request what a verifier gets: tokens, sampling parameters and a plan. Called in threads."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache

from services.api.messages import ChatMessage, ClientRequest, is_conversation
from services.logs.names import log_name
from services.router.config import RouterConfig
from services.router.learning.learning import Chosen, Learning
from services.router.rules.facts import Facts, facts_of
from services.router.rules.rule_book import RuleBook
from services.router.sampling import complete_sampling
from services.router.tokens import Tokens
from services.structured_outputs.checks import check_sampling
from speculation.errors import InvalidArgument, NotFound
from speculation.messages import GenerationRequest, VerifierCard
from speculation.room import room_behind
from speculation.types import SamplingParams

log = logging.getLogger(__name__)

# Predictions, and lists of bad words, whose tokens are kept.
_KEPT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """A request as a verifier gets it.

    Attributes:
        rule: the rule that planned it; empty: none.
        chosen: what was learnt that planned it; None: nothing.
    """

    request: GenerationRequest
    rule: str
    chosen: Chosen | None


class Preparation:
    """Prepares requests.

    Args:
        learning: plans what no rule does; None: the server's strategy does.
    """

    def __init__(self, config: RouterConfig, tokens: Tokens, rules: RuleBook, learning: Learning | None) -> None:
        self._config, self._tokens, self._rules, self._learning = config, tokens, rules, learning
        # All choices of a request have the same: each would take as long as the first one.
        self._predicted = lru_cache(_KEPT)(lambda tenant, text: tokens.encode_answer(text))
        self._spelt = lru_cache(_KEPT)(lambda tenant, words: tokens.spellings(words))

    def forget(self) -> None:
        """Keep nothing of any tenant's texts."""
        self._predicted.cache_clear()
        self._spelt.cache_clear()

    def prepare(self, request: ClientRequest, card: VerifierCard, open_requests: int) -> PreparedRequest:
        """A request as a verifier gets it.

        Args:
            open_requests: answers under way, for rules.

        Raises:
            OutriderError: the request cannot be honoured; names the field.
        """
        names = self._config.names_of(card)
        adapter = request.model if request.model in card.adapters else None
        if request.model is not None and adapter is None and request.model not in names:
            raise NotFound("model", request.model, ", ".join((*names, *card.adapters)))
        prompt = self.encode(request)
        sampling = self._sampling(request, card, len(prompt))
        facts = self._facts(request, card, len(prompt), sampling, open_requests)
        plan, rule = self._rules.plan(request, facts)
        chosen = None if rule or self._learning is None else self._learning.choose(request, facts, prompt)
        if chosen is not None:
            plan = chosen.plan
        # Users may choose the same request id, but ids must be unique at a verifier.
        name = f"{request.request_id}.{secrets.token_hex(4)}"
        by = f" by the rule {rule}" if rule else ""
        log.info("request %s: %d tokens, strategy %s%s", log_name(name, request.traceparent), len(prompt), plan.strategy, by)
        made = GenerationRequest(
            request_id=name,
            prompt=prompt,
            sampling=sampling,
            plan=plan,
            tenant=request.tenant,
            weight=request.weight,
            cache_salt=request.cache_salt,
            priority=request.priority,
            whole=request.whole,
            group=_group_of(request),
            adapter=adapter or "",
            traceparent=request.traceparent,
            tokenizer=self._config.tokenizer,
            # Not more than an answer can have: the rest could not be used.
            prediction=self._predicted(request.tenant, request.prediction)[: card.max_model_len],
        )
        return PreparedRequest(request=made, rule=rule, chosen=chosen)

    def facts(self, request: ClientRequest, card: VerifierCard, open_requests: int) -> Facts:
        """What rules may ask of a request.

        Raises:
            OutriderError: the request cannot be read; names the field.
        """
        prompt = self.encode(request)
        return self._facts(request, card, len(prompt), self._sampling(request, card, len(prompt)), open_requests)

    def encode(self, request: ClientRequest) -> tuple[int, ...]:
        """The tokens of a request's prompt or conversation."""
        source = request.input
        if isinstance(source, str):
            if request.infill is not None:
                return self._tokens.encode_infill(source, request.infill)
            return self._tokens.encode(source, special=request.add_special_tokens)
        messages = tuple(entry for entry in source if isinstance(entry, ChatMessage))
        if messages:
            return self._tokens.encode_chat(messages, request.chat)
        ids = tuple(entry for entry in source if isinstance(entry, int))
        if not ids:
            raise InvalidArgument("prompt", "empty", "at least one token, character or message")
        return ids

    def gap_ends(self, request: ClientRequest) -> tuple[int, ...]:
        """The tokens that end what fills a gap."""
        marks = self._tokens.infill
        return () if request.infill is None or marks is None else marks.ends

    def _facts(
        self, request: ClientRequest, card: VerifierCard, prompt_tokens: int, sampling: SamplingParams, open_requests: int
    ) -> Facts:
        return facts_of(
            request,
            model=self._config.names_of(card)[0],
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            open_requests=open_requests,
            at=datetime.now(UTC),
        )

    def _sampling(self, request: ClientRequest, card: VerifierCard, prompt_tokens: int) -> SamplingParams:
        room_behind(prompt_tokens, card.max_model_len)
        words = self._spelt(request.tenant, request.sampling.bad_words)
        sampling = complete_sampling(request.sampling, card, prompt_tokens, request.most_tokens, words)
        sampling = replace(sampling, stop_token_ids=self._ends(request, sampling))
        check_sampling(sampling)
        return sampling

    def _ends(self, request: ClientRequest, sampling: SamplingParams) -> tuple[int, ...]:
        """The tokens that end the answer, besides the model's own: of a stop that names one, of a gap, and of a turn."""
        turn = self._tokens.end_of_turn if is_conversation(request) and not sampling.ignore_eos else None
        gap = () if sampling.ignore_eos else self.gap_ends(request)
        named = self._tokens.named(sampling.stop)
        return tuple(dict.fromkeys((*sampling.stop_token_ids, *named, *gap, *(() if turn is None else (turn,)))))


def _group_of(request: ClientRequest) -> str:
    """What the requests have in common that may draft from each other's answers; empty: none may.

    No other tenant can name a tenant's group, nor can who has another salt. A private request drafts from no other's text.
    """
    if request.private:
        return ""
    if not request.group:
        return request.siblings
    named = json.dumps([request.tenant, request.cache_salt, request.group])
    return hashlib.sha256(named.encode()).hexdigest()[:32]
