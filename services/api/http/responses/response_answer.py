"""A response: as a whole, or in events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from typing_extensions import override

from services.api.http.event_stream import NamedEvents
from services.api.http.openai.answer_in_progress import AnswerInProgress
from services.api.http.openai.answer_reader import Delta, reader_for
from services.api.http.openai.chat_options import VERBOSITY
from services.api.http.openai.choice_text import Piece, TextToken
from services.api.http.openai.errors import error_body, http_status
from services.api.http.openai.logprobs import Speller, chat_logprobs
from services.api.http.openai.origin_fields import origins_of_all
from services.api.http.openai.preparing import Prepared
from services.api.http.openai.usage import metrics
from services.api.http.responses.chat_body import AskedResponse
from services.api.http.responses.output_items import Ended, OutputItems
from services.api.http.responses.response_object import (
    FailureCode,
    IncompleteDetails,
    ResponseFailure,
    ResponseObject,
    Status,
)
from services.api.http.responses.tool_names import ToolName
from services.api.messages import Completion, RouterPort, TextChunk
from services.in_turns import in_turns
from speculation.errors import InvalidArgument, OutriderError
from speculation.types import FinishReason

Keep = Callable[[dict[str, Any]], Awaitable[None]]
# Of OpenAI's API, for answers whose request and model do not say.
_TEMPERATURE = _TOP_P = 1.0


class ResponseCancelled(OutriderError):
    """The client has cancelled the response."""


class ResponseStream(NamedEvents):
    """A response as server-sent events."""

    @override
    def has_text(self, content: dict[str, Any]) -> bool:
        return "delta" in content


class ResponseAnswer(AnswerInProgress):
    """Implements ``AnswerInProgress``.

    Args:
        new: what is asked for.
        response_id: its id.
        stores: it will be stored.
        keep: is given the response when it has ended, before its client is.
    """

    stream_form = ResponseStream

    def __init__(
        self,
        new: AskedResponse,
        prepared: Prepared,
        router: RouterPort,
        name: str,
        created: int,
        *,
        response_id: str,
        stores: bool,
        keep: Keep,
    ) -> None:
        super().__init__(new.asked, prepared, name, created, prefix="resp", kind=("response", "response"))
        self.id = response_id
        self._new = new
        self._stores = stores
        self._keep = keep
        self._speller = Speller(router, as_ids=new.asked.tokens_as_ids)
        self._reader = reader_for(new.asked, prepared, 0)
        self._items = OutputItems(response_id)
        # Those that the answer tells of besides their text.
        self._tokens: list[TextToken] = []
        self._sent = 0

    @property
    @override
    def ignored(self) -> tuple[str, ...]:
        """Fields of the request that had no effect."""
        return tuple(self._new.names.of(name) for name in self.prepared.ignored)

    @property
    @override
    def thought_tokens(self) -> int | None:
        return self._reader.thought_tokens if self.card.thoughts else None

    @override
    def opening(self) -> list[dict[str, Any]]:
        begun = self._made("in_progress")
        return self._numbered([{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")])

    @override
    async def add(self, index: int, event: TextChunk | Completion) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for piece in self.pieces_of(index, event):
            told += await self._tell(piece)
        if isinstance(event, Completion):
            told += await self._end()
        return self._numbered(told)

    @override
    async def whole(self) -> dict[str, Any]:
        async for part in in_turns(self.records[0].pieces):
            for piece in part:
                await self._tell(piece)
        ended: dict[str, Any] = (await self._end())[-1]["response"]
        return ended

    @override
    async def failed(self, error: OutriderError) -> list[dict[str, Any]]:
        ended = self._items.end("incomplete")
        if isinstance(error, ResponseCancelled):
            # There is no event of its own for it.
            kind, response = "response.incomplete", await self.response("cancelled")
        else:
            why = ResponseFailure(code=_code(error), message=error_body(error)["error"]["message"])
            kind, response = "response.failed", await self.response("failed", why)
        await self._keep(response)
        return self._numbered([*ended, {"type": kind, "response": response}])

    async def _tell(self, piece: Piece) -> list[dict[str, Any]]:
        if self.asked.return_token_ids or self.asked.report != "none":
            self._tokens += piece.tokens
        if self.asked.top_logprobs is not None:
            shown = [token for token in piece.tokens if token.logprobs is not None and token.shown]
            logprobs = map(_with_bytes, (await chat_logprobs(shown, self._speller))["content"])
            self._items.note(zip((token.text for token in shown), logprobs, strict=True))
        return self._said(self._reader.push(piece))

    def _said(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.thought:
                events += self._items.think(delta.text)
                continue
            if delta.call is None:
                events += self._items.say(delta.text)
                continue
            if delta.name:
                tool = self._new.called.get(delta.name) or ToolName(name=delta.name)
                events += self._items.call(delta.id, tool)
            if delta.text:
                events += self._items.argue(delta.text)
        return events

    @property
    def ended(self) -> Ended | None:
        """How its text has ended, even if it is not stored yet; None: it goes on."""
        if (end := self.records[0].end) is None:
            return None
        return "incomplete" if end.finish_reason is FinishReason.LENGTH else "completed"

    async def _end(self) -> list[dict[str, Any]]:
        end, status = self.records[0].end, self.ended
        assert end is not None and status is not None
        events = self._said(self._reader.finish(end)) + self._items.end(status)
        response = await self.response(status)
        await self._keep(response)
        return [*events, {"type": f"response.{status}", "response": response}]

    def _numbered(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        first, self._sent = self._sent, self._sent + len(events)
        return [{**event, "sequence_number": first + index} for index, event in enumerate(events)]

    async def response(self, status: Status, error: ResponseFailure | None = None) -> dict[str, Any]:
        """The response as it is now."""
        told, end = self._made(status, error), self.records[0].end
        if end is None or status not in ("completed", "incomplete"):
            return told
        own: dict[str, Any] = {"seed": end.seed, "stop_reason": end.stop, "metrics": metrics([end], self.asked.report)}
        if self.asked.return_token_ids:
            own |= {"prompt_token_ids": list(self.prepared.prompts[0])}
        origins = await origins_of_all(self._tokens, self.asked.report)
        return {**told, **own, **self.ids_of(self._tokens), **origins, "usage": self._usage()}

    def _made(self, status: Status, error: ResponseFailure | None = None) -> dict[str, Any]:
        """What is told of a response, whether it has ended or not."""
        body = self._new.body
        told = ResponseObject(
            id=self.id,
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=error,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            model=self.card.name,
            store=self._stores,
            service_tier="default" if self.asked.tier else None,
            system_fingerprint=self.fingerprint,
            max_output_tokens=None if body.max_output_tokens is None else self.asked.sampling.max_tokens,
            output=[],
            **self._effective(),
            **{name: value for name in _ECHOED if (value := getattr(body, name)) is not None},
        ).model_dump(mode="json")
        # As they are, since they may tell of thousands of tokens.
        return {**told, "output": list(self._items.done)}

    def _effective(self) -> dict[str, Any]:
        """Fields of the request that have a value, too, where it does not say."""
        body, sampling, model = self._new.body, self.prepared.requests[0].sampling, self.card.defaults
        text, reasoning = body.text, body.reasoning
        default = None if sampling.ignore_generation_config else model
        return {
            "temperature": _first(body.temperature, default and default.temperature, _TEMPERATURE),
            "top_p": _first(body.top_p, default and default.top_p, _TOP_P),
            "top_logprobs": self.asked.top_logprobs or 0,
            "text": {"format": (text and text.format) or {"type": "text"}, "verbosity": self._verbosity()},
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        }

    def _verbosity(self) -> str:
        text = self._new.body.text
        wanted = None if text is None or VERBOSITY in self.prepared.ignored else text.verbosity
        return wanted or "medium"

    def _usage(self) -> dict[str, Any]:
        counts = self._counts(whole=True)
        of_prompt, of_answer = counts["prompt_tokens_details"], counts.get("completion_tokens_details", {})
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **of_prompt},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **of_answer},
            "total_tokens": counts["total_tokens"],
        }


_ECHOED = (
    "instructions", "metadata", "parallel_tool_calls", "previous_response_id", "prompt_cache_key",
    "safety_identifier", "tool_choice", "tools", "truncation",
    "user",
)  # fmt: skip


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """A token's log-probability as this API has it: special tokens have no bytes, not null."""
    top = [{**each, "bytes": each["bytes"] or []} for each in entry["top_logprobs"]]
    return {**entry, "bytes": entry["bytes"] or [], "top_logprobs": top}


def _code(error: OutriderError) -> FailureCode:
    if http_status(error) == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidArgument) else "server_error"
