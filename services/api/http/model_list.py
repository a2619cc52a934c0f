"""GET /v1/models: each model as OpenAI's API and Anthropic's tell of it, in one object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from services.access.charges import nameable
from services.access.gate import Caller
from services.api.http.openai.errors import Refused
from services.api.http.openai.model_fit import called
from services.api.model_card import ModelCard
from services.whole_number import whole_number

_OWNER = "outrider"
_MOST_LISTED = 1000
_AFTER, _BEFORE, _LIMIT = "after_id", "before_id", "limit"


def listed(cards: Iterable[ModelCard], caller: Caller, started: int) -> dict[str, dict[str, Any]]:
    """The models by each of their names, and behind them their adapters.

    Args:
        started: when the server started, in seconds since 1970; counts where a model's files have no time.
    """
    return {
        name: _model(nameable(caller.limits, called(card, name)), card.name if name in card.adapters else None, started)
        for card in cards
        for name in (card.name, *card.aliases, *card.adapters)
    }


def _model(card: ModelCard, parent: str | None, started: int) -> dict[str, Any]:
    created = card.created or started
    return {
        "id": card.name,
        "object": "model",
        "type": "model",
        "display_name": card.name,
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "owned_by": _OWNER,
        "root": card.name,
        "parent": parent,
        "max_model_len": card.max_model_len,
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
        "strategies": list(card.strategies),
        "default_strategy": card.default_strategy,
        "bit_exact": card.bit_exact,
        "weights": asdict(card.weights),
        "drafters": [{"name": each.name, "strategy": each.strategy} for each in card.drafters],
    }


def page_of(models: Mapping[str, dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The list, or the part of it that Anthropic's clients ask for.

    Raises:
        Refused: a part of the query is no id of the list, or no number of models; names it.
    """
    ids, given = list(models), query.get(_LIMIT, str(_MOST_LISTED))
    if (most := whole_number(given, 1, _MOST_LISTED)) is None:
        raise Refused(_LIMIT, given or "empty", f"a whole number from 1 to {_MOST_LISTED}")
    if (after := query.get(_AFTER)) is not None:
        ids = ids[_place(_AFTER, after, ids) + 1 :]
    if (before := query.get(_BEFORE)) is not None:
        ids = ids[: _place(_BEFORE, before, ids)]
    # The page that ends before an id, or the first one.
    shown = ids[:most] if before is None else ids[-most:]
    ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
    return {"object": "list", "data": [models[each] for each in shown], "has_more": len(ids) > most, **ends}


def _place(field: str, name: str, ids: list[str]) -> int:
    if name not in ids:
        raise Refused(field, name or "empty", f"one of {', '.join(ids)}")
    return ids.index(name)
