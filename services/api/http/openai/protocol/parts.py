"""Objects within the bodies of chat and text completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.api.http.declared import Declared, Whole
from services.api.http.openai.protocol.marks import NO_EFFECT, Aside, OnlyFalse, Refused
from speculation import limits
from speculation.types import AcceptanceRule, Effort, Report

Filled = Annotated[str, Field(min_length=1)]
Schema = dict[str, Any]
_LEAST_S, _MOST_S = limits.RELOAD_WITHIN_S
Within = Annotated[
    float | None,
    Field(
        ge=_LEAST_S,
        le=_MOST_S,
        description="seconds within which answers that are to end must have ended, else nothing changes; unset: "
        f"{limits.RELOAD_S:g}",
    ),
]


class StreamOptions(Declared):
    """How an answer is streamed."""

    include_usage: bool = Field(False, description="a last event with the usage of the whole answer")
    continuous_usage_stats: bool = Field(False, description="the usage so far in each event, as vLLM has it")
    include_obfuscation: bool = Field(True, description="events are filled up, so that their sizes tell less of the text")


class Speculation(Declared):
    """How the answer is drafted, and what it tells of that."""

    strategy: str | None = Field(None, max_length=64, description="one of the model's strategies")
    sources: list[str] | None = Field(
        None,
        description=f"1 to {limits.MAX_LISTED_SOURCES} sources that draft, in place of a strategy: one tree from exactly "
        "these, as blend makes it",
    )
    num_speculative_tokens: Whole | None = Field(
        None, ge=0, le=limits.MAX_TREE_NODES, description="most drafted tokens to check in one pass; 0: plain decoding"
    )
    acceptance: AcceptanceRule | None = Field(
        None, description="walk: the same seed gives the same tokens under any strategy; rejection: the classic rule"
    )
    effort: Effort | None = Field(
        None,
        description="paper: each step waits for a draft and checks all of it; measured: as far as that pays; unset: "
        "measured for auto and blend, paper for other strategies",
    )
    drafter: str | None = Field(
        None, max_length=64, description="the model that drafts, by its name; unset: a rule names one, or all that pay draft"
    )
    group: str | None = Field(
        None,
        max_length=limits.MAX_GROUP_CHARACTERS,
        description="the caller's name for requests that draft from each other's answers while these are written",
    )
    report: Report | None = Field(
        None, description="sources: who guessed each token; trees: also what each pass checked; none: nothing"
    )
    compare: list[str] | None = Field(
        None, description=f"at most {limits.MAX_COMPARED} strategies: what they would have made of the answer"
    )


class Echoed(Declared):
    """What clients send back within messages as they have read it in an answer."""

    object: Aside = None
    created: Aside = None
    index: Aside = None
    status: Aside = None
    cache_control: Aside = None
    provider_specific_fields: Aside = None


class TextPart(Echoed):
    """A part of a content."""

    type: Literal["text"]
    text: str
    annotations: Aside = None
    id: Aside = None


Content = str | list[TextPart]


class Prediction(Declared):
    """What the answer is expected to be, such as a text that is only to be edited."""

    type: Literal["content"]
    content: Content


class SchemaForm(Declared):
    """A JSON schema that the answer must follow."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    strict: bool | None = Field(None, description="without effect: a schema is always followed")
    schema_: Schema = Field(alias="schema", description="a JSON schema")


class ResponseFormat(Declared):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaForm | None = Field(None, description="where type says so, which then has this, or schema")
    schema_: Schema | None = Field(
        None, alias="schema", description="of json_object and json_schema: a JSON schema, as llama-server has it"
    )


Pattern = Annotated[str, Field(max_length=limits.MAX_GRAMMAR_CHARACTERS)]
Choices = Annotated[list[Filled], Field(min_length=1)]


class StructuredOutputs(Declared):
    """The form that an answer must have: exactly one of these."""

    json_: Schema | Pattern | None = Field(None, alias="json", description="a JSON schema, or its text")
    json_object: bool | None = Field(None, description="true: any JSON object")
    regex: Pattern | None = Field(None, description="an expression that the whole answer matches")
    choice: Choices | None = Field(None, description="one of these texts")
    grammar: Pattern | None = Field(None, description="a grammar in Lark's form, with a rule start")
    # What vLLM's class has besides, as its clients write it out whole.
    disable_fallback: Annotated[bool | None, NO_EFFECT] = Field(None, description="one engine of grammars is all")
    disable_any_whitespace: Annotated[OnlyFalse | None, NO_EFFECT] = Field(
        None, description="false: say x-guidance in the schema, or regex"
    )
    disable_additional_properties: Annotated[OnlyFalse | None, NO_EFFECT] = Field(
        None, description="false: say additionalProperties in the schema"
    )
    whitespace_pattern: Refused = Field(None, description="unset: say x-guidance in the schema, or regex")
    structural_tag: Refused = Field(None, description="unset: say tools whose strict is true, or grammar")
