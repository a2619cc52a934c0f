"""What becomes of a declared field: it is honoured, has no effect, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, get_args

from annotated_types import Ge, Le, MaxLen
from pydantic import BaseModel, BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

Effect = Literal["honoured", "without effect", "refused"]


class NoEffect:
    """Marks a field of which no value that is taken could change an answer."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "x-effect": "none"}


NO_EFFECT = NoEffect()


def _a_truth(value: object) -> object:
    # To Python, 0 is False.
    if value is not None and not isinstance(value, bool):
        raise ValueError("true or false")
    return value


OnlyTrue = Annotated[Literal[True], BeforeValidator(_a_truth)]
OnlyFalse = Annotated[Literal[False], BeforeValidator(_a_truth)]
# Of fields of other servers' APIs that all ask for something that is not done: null alone is taken, which is unset.
Refused: TypeAlias = None
# A field of messages, of their parts and of tools that clients add for themselves or for other servers.
Aside = Annotated[Any, NO_EFFECT]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def effect_of(field: FieldInfo) -> Effect:
    """What becomes of a field."""
    if field.annotation is NoneType:
        return "refused"
    return "without effect" if NO_EFFECT in field.metadata else "honoured"


def declared_fields(body: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields of an object by their names in JSON."""
    for name, field in body.model_fields.items():
        yield field.alias or name, field


def names_of(body: type[BaseModel], effect: Effect) -> list[str]:
    """The fields of one kind."""
    return [name for name, field in declared_fields(body) if effect_of(field) == effect]


def field_of(body: type[BaseModel], name: str) -> FieldInfo:
    """A field by its name in JSON."""
    return next(field for known, field in declared_fields(body) if known == name)


@cache
def range_of(body: type[BaseModel], name: str) -> tuple[float, float]:
    """The least and the greatest value of a number."""
    marks = field_of(body, name).metadata
    low, high = (next(mark for mark in marks if isinstance(mark, kind)) for kind in (Ge, Le))
    return low.ge, high.le  # type: ignore[union-attr, return-value]


@cache
def most_of(body: type[BaseModel], name: str) -> int | None:
    """The most characters of a text, or entries of a list; None: any number."""
    return next((mark.max_length for mark in field_of(body, name).metadata if isinstance(mark, MaxLen)), None)


@cache
def words_of(body: type[BaseModel], name: str) -> tuple[str, ...]:
    """The words of which a text is one."""
    kind = field_of(body, name).annotation
    return tuple(word for part in (kind, *get_args(kind)) for word in get_args(part) if isinstance(word, str))
