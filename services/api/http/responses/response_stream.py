"""A response as server-sent events: each has its name, and the last one says how the response ended."""

from __future__ import annotations

from typing import Any

from services.api.http.event_stream import EventStream, event_bytes


class ResponseStream(EventStream):
    """A response that is being streamed."""

    last = b""

    def has_text(self, content: dict[str, Any]) -> bool:
        return "delta" in content

    def written(self, content: dict[str, Any], padding: int | None) -> bytes:
        return event_bytes(content, padding, name=content["type"])
