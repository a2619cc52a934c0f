"""The items that a stored response answered, page by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.api.http.openai.errors import Refused
from services.api.http.responses.conversation import Item
from services.api.http.responses.response_object import InputItems
from services.whole_number import whole_number

_MOST, _USUAL = 100, 20
_ORDERS = ("asc", "desc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Which items are wanted.

    Attributes:
        after: the item before the first one; empty: none.
        oldest_first: in which order.
    """

    limit: int = _USUAL
    after: str = ""
    oldest_first: bool = False


def read_page(query: Mapping[str, str]) -> Page:
    """The fields of the query; others ask for nothing here.

    Raises:
        Refused: one is wrong; names it.
    """
    given, order = query.get("limit", str(_USUAL)), query.get("order", "desc")
    if (limit := whole_number(given, 1, _MOST)) is None:
        raise Refused("limit", given or "empty", f"a whole number from 1 to {_MOST}")
    if order not in _ORDERS:
        raise Refused("order", order or "empty", f"one of {', '.join(_ORDERS)}")
    return Page(limit=limit, after=query.get("after", ""), oldest_first=order == "asc")


def input_items(response_id: str, context: Sequence[Item], page: Page) -> InputItems:
    """A page of items.

    Raises:
        Refused: ``page.after`` is none of them.
    """
    stem = response_id.removeprefix("resp_")
    items = [_shown(item, f"in_{stem}_{index}") for index, item in enumerate(context)]
    if not page.oldest_first:
        items.reverse()
    start = 0
    if page.after:
        start = 1 + next((index for index, item in enumerate(items) if item["id"] == page.after), len(items))
        if start > len(items):
            raise Refused("after", page.after, "the id of one of the items")
    told = items[start : start + page.limit]
    first, last = (told[0]["id"], told[-1]["id"]) if told else (None, None)
    return InputItems(data=told, first_id=first, last_id=last, has_more=start + page.limit < len(items))


def _shown(item: Item, name: str) -> dict[str, Any]:
    """An item as the API lists it: with an id, and contents as lists of parts."""
    given = item.get("id")
    shown = {"type": "message", "status": "completed", **item, "id": given if isinstance(given, str) and given else name}
    if isinstance(text := item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        shown["content"] = [{"type": kind, "text": text, **more}]
    return shown
