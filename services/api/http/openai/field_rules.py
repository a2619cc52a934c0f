"""Fields of OpenAI's, vLLM's and llama-server's APIs that are not honoured here, as they are declared: their harmless values
are taken, all others refused. And what to say instead of fields that are not declared."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from services.api.http.openai.fields import Fields
from services.api.http.openai.protocol.marks import declared_fields, effect_of

_STRUCTURED = "unset: say structured_outputs"
_TYPES = ConfigDict(strict=True)

# Fields of llama-server, and old ones of vLLM's: what to say instead.
HINTS: dict[str, str] = {
    "grammar": "unset: say structured_outputs.grammar",
    "json_schema": "unset: say response_format or structured_outputs.json",
    "n_probs": "unset: say logprobs",
    "n_predict": "unset: say max_tokens",
    "timings_per_token": "unset: say stream_options.continuous_usage_stats",
    "response_fields": "unset: answers are given whole",
    "typical_p": "unset: the model's generation_config may set it",
    "mirostat": "unset: say temperature, top_p or min_p",
    "repeat_penalty": "unset: say repetition_penalty",
    "speculative": "unset: say speculation",
    "strategy": "unset: say speculation.strategy",
    "stop_sequences": "unset: say stop",
    "max_new_tokens": "unset: say max_tokens",
    **{f"speculative.{name}": "unset: say speculation" for name in ("n_max", "n_min", "p_min")},
    "guided_whitespace_pattern": _STRUCTURED,
}


def take_unhonoured(fields: Fields, body: type[BaseModel]) -> dict[str, Any]:
    """Take the fields that ask for nothing; gives those that are set.

    Raises:
        Refused: one asks for something; says what is allowed.
    """
    taken = {}
    for key, (harmless, allowed) in _unhonoured(body).items():
        value = fields.take(key)
        if value is not None and not _is(harmless, value):
            shown = value if isinstance(value, str | int | float) and value != "" else "set"
            raise fields.refuse(key, shown, allowed, "unsupported_parameter")
        if value is not None:
            taken[key] = value
    return taken


@cache
def _unhonoured(body: type[BaseModel]) -> dict[str, tuple[TypeAdapter[Any] | None, str]]:
    """For each such field, its harmless values, if it has any, and what is said of all others."""
    return {
        name: (_harmless(field), field.description or "unset")
        for name, field in declared_fields(body)
        if effect_of(field) != "honoured"
    }


def _harmless(field: FieldInfo) -> TypeAdapter[Any] | None:
    if effect_of(field) == "refused":
        return None
    kind: Any = Annotated[field.annotation, *field.metadata]
    return TypeAdapter(kind, config=_TYPES)


def _is(kind: TypeAdapter[Any] | None, value: Any) -> bool:
    if kind is None:
        return False
    try:
        kind.validate_python(value)
    except ValidationError:
        return False
    return True
