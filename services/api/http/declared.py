"""Bodies that are declared as pydantic models: their errors as ours (field, value, what is allowed), and their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.json_schema import models_json_schema

from services.api.http.openai.errors import Refused
from services.wrong_values import did_you_mean

_SHOULD = "Input should be "
# Where OpenAPI keeps schemas.
_PLACE = "#/components/schemas/{model}"
# Bounds of numbers that are turned into another type first: pydantic leaves them under its own names.
_BOUNDS: dict[str, str] = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


class Declared(BaseModel):
    """An object of a request. What it does not declare is refused, and no value is turned into one of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _whole(value: object) -> object:
    """2.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
_Body = TypeVar("_Body", bound=Declared)


def read_declared(
    kind: type[_Body], content: Mapping[str, Any], path: str = "", hints: Mapping[str, str] | None = None
) -> _Body:
    """An object as it is declared.

    Args:
        path: the object's own name in errors, such as "tools[0]"; empty: the whole body.
        hints: for fields of other servers, what to say instead of "there is no such field".

    Raises:
        Refused: a field is wrong, missing or unknown; names the first.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _refused(kind, error, path, hints or {}) from None


def _refused(kind: type[Declared], error: ValidationError, path: str, hints: Mapping[str, str]) -> Refused:
    first = error.errors(include_url=False, include_context=False)[0]
    where, problem = first["loc"], first["type"]
    field = _named(path, where)
    if problem == "missing":
        return Refused(field, "unset", "set", "missing_required_parameter")
    value = first["input"]
    shown = value if isinstance(value, str | int | float) and value != "" else _shown(value)
    if problem == "extra_forbidden":
        name = str(where[-1])
        unknown = f"unset: there is no such field{did_you_mean(name, kind.model_fields) if len(where) == 1 else ''}"
        return Refused(field, shown, hints.get(field, unknown), "unknown_parameter")
    code = "invalid_type" if problem.endswith("_type") else "invalid_value"
    # pydantic names its own class there.
    allowed = "an object" if problem in ("model_type", "dict_type") else first["msg"].removeprefix(_SHOULD)
    return Refused(field, shown, allowed, code)


def _shown(value: object) -> str:
    return "null" if value is None else "empty" if value == "" else "set"


def _named(path: str, where: tuple[int | str, ...]) -> str:
    """ "input[0].content" of ("input", 0, "content")."""
    name = path
    for part in where:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of one object, as JSON Schema 2020-12 has it; those within it are in its ``$defs``."""
    tidied: dict[str, Any] = _tidied(model.model_json_schema())
    return tidied


def schemas_of(models: Sequence[type[BaseModel]]) -> tuple[dict[type[BaseModel], Any], dict[str, Any]]:
    """Where the schema of each object is in OpenAPI 3.1, and all of them, with those of objects within, by their names."""
    places, found = models_json_schema([(model, "validation") for model in models], ref_template=_PLACE)
    return {model: places[model, "validation"] for model in models}, _tidied(found["$defs"])


def _tidied(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_tidied(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            kept[key] = {name: _tidied(each) for name, each in value.items()}
        elif not (key == "title" and isinstance(value, str)) and not (key == "default" and value is None):
            kept[_BOUNDS.get(str(key), str(key))] = _tidied(value)
    return kept
