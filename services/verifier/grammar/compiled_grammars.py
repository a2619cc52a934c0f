"""Compiles requests' grammars for one target's tokenizer, in a thread of its own, and keeps those used last."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from services.fair_threads import FairThreads
from services.structured_outputs.checks import check_companions, check_messages
from services.structured_outputs.grammars import engine_text, field_of, limits, refusal
from services.verifier.grammar.grammar_state import GrammarState
from speculation.errors import InvalidArgument
from speculation.types import SamplingParams, StructuredOutputs

log = logging.getLogger(__name__)

# Compiled grammars that are kept. Most take well under a megabyte.
_KEPT = 64
# Tokens from which on a vocabulary is made ready before anything is served: the engine takes a second for 50,000 of them, in
# which it lets no other thread run.
_LARGE = 4096
# Seconds until a tokenizer that could not be loaded is tried again.
_AGAIN_S = 60.0


class CompiledGrammars:
    """The grammars of one target's requests.

    Args:
        model_path: the folder of the target, with its tokenizer.
        vocab_size: number of its logits, which may be more than the tokenizer has tokens.
        eos_token_ids: its end-of-text tokens.
    """

    def __init__(self, model_path: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        # One thread: grammars that take long to compile delay each other, one of each tenant at a time, and nobody else.
        self._threads = FairThreads("grammars", 1)
        self._tokenizer: LLTokenizer | None = None
        # Why there is none, and until when that counts.
        self._refused, self._refused_until = "", 0.0
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    async def prepare(self) -> None:
        """Make a large vocabulary ready, so that the first request that needs it stops nobody."""
        if self._eos_token_ids and self._vocab_size >= _LARGE and (Path(self._model_path) / "tokenizer.json").is_file():
            await self._threads.run(self._load_tokenizer, 0)

    async def open(
        self, params: SamplingParams, committed: Sequence[int] = (), tenant: str | None = None
    ) -> GrammarState | None:
        """The state of a request's grammar after ``committed``, the part of its answer that is there; None: it has none.

        Args:
            tenant: whose request it is; None: not known.

        Raises:
            InvalidArgument: it cannot be honoured.
            ResourceExhausted: the machine has no thread to compile it in.
            NotBegun: the thread was stopped before its turn.
            Internal: it forbids what is committed.
        """
        structured = params.structured_outputs
        if structured is None:
            return None
        check_companions(params, structured)
        # Turn by turn: how long one takes does not follow from its length.
        return await self._threads.run(partial(self._open, structured, tuple(committed)), 1, tenant)

    def stop(self) -> None:
        """End the thread; what it has begun goes on to its end."""
        self._threads.stop()

    def _open(self, structured: StructuredOutputs, committed: tuple[int, ...]) -> GrammarState:
        with self._lock:
            compiled = self._compiled.pop(structured, None)
        if compiled is None:
            compiled = self._compile(structured)
        with self._lock:
            self._compiled[structured] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        # Other threads copy this copy, never the one that is kept.
        own, kept = compiled.deep_copy(), compiled
        state = GrammarState(
            own.deep_copy,
            self._eos_token_ids,
            lambda words: refusal(structured, words),
            lambda: self._compile_again(structured, kept),
        )
        state.commit(committed)
        return state

    def _compile_again(self, structured: StructuredOutputs, used_up: LLMatcher) -> LLMatcher:
        """A matcher that shares its limits with nobody; the kept one is given up, since its limits are used up."""
        with self._lock:
            if self._compiled.get(structured) is used_up:
                del self._compiled[structured]
        return self._compile(structured)

    def _compile(self, structured: StructuredOutputs) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer_for(structured), engine_text(structured), log_level=0, limits=limits())
        check_messages(structured, [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings())
        # What is too complex mostly shows at once; and what is computed now need not be computed between passes.
        state = GrammarState(matcher.deep_copy, self._eos_token_ids, lambda words: refusal(structured, words))
        first = state.allowed(())
        assert first is not None
        token = int(np.unpackbits(first, bitorder="little").argmax())
        if token not in self._eos_token_ids and state.allowed((token,)) is None:
            raise refusal(structured, "no text of this model's tokens satisfies it")
        return matcher

    def _tokenizer_for(self, structured: StructuredOutputs) -> LLTokenizer:
        if not self._eos_token_ids:
            raise InvalidArgument(field_of(structured), "set", "unset: this model has no token that ends an answer")
        if self._tokenizer is None and time.monotonic() >= self._refused_until:
            self._load_tokenizer()
        if self._tokenizer is None:
            raise InvalidArgument(field_of(structured), "set", f"unset: {self._refused}")
        return self._tokenizer

    def _load_tokenizer(self) -> None:
        """Make the engine's form of the tokenizer. What fails is tried again later: the fault may be the machine's."""
        # transformers takes a moment to load, and not every server is asked for a grammar.
        from transformers import AutoTokenizer

        try:
            text = AutoTokenizer.from_pretrained(self._model_path, trust_remote_code=False).backend_tokenizer.to_str()
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids))
        except Exception as error:
            log.warning("the grammar engine cannot use the tokenizer at %s", self._model_path, exc_info=True)
            self._refused = f"the grammar engine cannot use this model's tokenizer ({str(error)[:200]})"
            self._refused_until = time.monotonic() + _AGAIN_S
