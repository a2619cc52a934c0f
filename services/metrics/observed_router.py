"""A router whose requests are counted and timed, as its users see them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from typing_extensions import override

from services.api.messages import ClientRequest, Completion, RouterPort, TextChunk
from services.api.passing_router import PassingRouter
from services.metrics.registry import Metrics
from services.statuses import outcome_of


class ObservedRouter(PassingRouter):
    """Implements ``services.api.messages.RouterPort`` in front of another router."""

    def __init__(self, router: RouterPort, metrics: Metrics) -> None:
        super().__init__(router)
        self._open = 0
        self._requests = metrics.counter("requests_total")
        self._prompt_tokens = metrics.counter("prompt_tokens_total")
        self._tokens = metrics.counter("generation_tokens_total")
        self._gap = metrics.histogram("inter_token_latency_seconds")
        self._first = metrics.histogram("time_to_first_token_seconds")
        self._whole = metrics.histogram("e2e_request_latency_seconds")
        self._per_token = metrics.histogram("request_time_per_output_token_seconds")
        self._queue = metrics.histogram("request_queue_time_seconds")
        self._prefill = metrics.histogram("request_prefill_time_seconds")
        self._decode = metrics.histogram("request_decode_time_seconds")
        self._inference = metrics.histogram("request_inference_time_seconds")
        self._of_prompt = metrics.histogram("request_prompt_tokens")
        self._of_answer = metrics.histogram("request_generation_tokens")
        self._most = metrics.histogram("request_params_max_tokens")
        self._ready = metrics.gauge("ready")
        metrics.follow("num_requests_open", lambda: {(): self._open})

    @override
    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        ended = False
        last: float | None = None
        self._open += 1
        events = self._router.generate(request)
        try:
            async for event in events:
                if isinstance(event, Completion):
                    ended = True
                    self._completed(request, event)
                elif event.token_ids:
                    now = time.perf_counter()
                    if last is not None:
                        self._gap.observe(now - last)
                    last = now
                    self._tokens.add(len(event.token_ids))
                yield event
        except BaseException as error:
            if not ended:
                self._requests.add(1, *outcome_of(error))
            raise
        finally:
            self._open -= 1
            await events.aclose()

    def _completed(self, request: ClientRequest, event: Completion) -> None:
        timing, tokens = event.timing, event.completion_tokens
        first_s = timing.time_to_first_token_s
        self._requests.add(1, event.finish_reason.value, "OK")
        self._prompt_tokens.add(len(event.prompt_token_ids))
        self._of_prompt.observe(len(event.prompt_token_ids))
        self._of_answer.observe(tokens)
        if request.sampling.max_tokens is not None:
            self._most.observe(request.sampling.max_tokens)
        self._first.observe(first_s)
        self._whole.observe(timing.total_s)
        self._queue.observe(timing.queue_s)
        self._prefill.observe(max(0.0, first_s - timing.queue_s))
        self._decode.observe(timing.total_s - first_s)
        self._inference.observe(max(0.0, timing.total_s - timing.queue_s))
        if tokens > 1:
            self._per_token.observe((timing.total_s - first_s) / (tokens - 1))

    @override
    async def ready(self) -> bool:
        ready = await super().ready()
        self._ready.set(float(ready))
        return ready
