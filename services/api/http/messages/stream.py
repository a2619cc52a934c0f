"""Messages as server-sent events: each has its name, and the last one says that it is."""

from __future__ import annotations

from typing import Any

from services.api.http.event_stream import EventStream, event_bytes


class MessageStream(EventStream):
    """A message that is being streamed."""

    last = b""

    def has_text(self, content: dict[str, Any]) -> bool:
        return bool(content["type"].startswith("content_block"))

    def written(self, content: dict[str, Any], padding: int | None) -> bytes:
        return event_bytes(content, padding, name=content["type"])

    async def ping(self) -> None:
        await self.events([{"type": "ping"}])
