"""The form of a constrained answer in llguidance's notation: JSON schema, any JSON object, regex, choice, Lark grammar.

Router and verifier both use it: the router refuses what the engine cannot hold an answer to (checks.py), in its words; the
verifier compiles the same text. Nothing that a grammar asks for is left out: a keyword that the engine does not implement,
and an attribute that the decoding loop does not honour, are refused (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits

from services.logs.printable import printable_line
from services.structured_outputs.json_schemas import AskedPatterns, without_vacuous
from speculation.errors import InvalidArgument
from speculation.types import StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON allows any amount of white space between tokens, and small models write it without end.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"
MAX_CHOICES = 1024
# Expressions that a grammar's lexer may be made of: enough for a schema of the greatest length, and worth half a second.
_LEXER_FUEL = 400_000
_MOST_WORDS = 300
# Attributes of a rule that change how its tokens are chosen, which is the request's to say. A rule's attributes stand in one
# line, beside strings and regexes. No part of the pattern can match a text in two ways, so the search takes linear time.
_ATTRIBUTE = re.compile(
    r"""^[^\S\n]*+[?!]?\w++[^\S\n]*+\[(?:"(?:\\.|[^"\\\n])*+"|/(?:\\.|[^/\\\n])*+/|[^\]"/\n])*?\b(temperature)\b""",
    re.MULTILINE,
)
# A slash, or the end of a line, would end a regular expression in a grammar.
_ENDS_REGEX = re.compile(r"\\.|[/\n]", re.DOTALL)


def limits() -> LLParserLimits:
    """Bounds of the engine's work, for one grammar and for one mask."""
    return LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)


def field_of(structured: StructuredOutputs) -> str:
    """The name of the request's field that holds the constraint."""
    return f"structured_outputs.{structured.kind}"


def refusal(structured: StructuredOutputs, words: str) -> InvalidArgument:
    """The error for a constraint that cannot be honoured.

    Args:
        words: what is wrong with it; may quote the constraint, so it is clipped and freed of control characters.
    """
    shown = printable_line(words.partition("<non-verbose/>")[0], _MOST_WORDS)
    value = printable_line(structured.text, 4 * _MOST_WORDS) or "true"
    return InvalidArgument(field_of(structured), value, f"what the grammar engine supports: {shown}")


def engine_text(structured: StructuredOutputs) -> str:
    """The constraint as llguidance reads it.

    Raises:
        InvalidArgument: its text is not of its kind.
    """
    try:
        return _engine_text(structured)
    except (ValueError, RecursionError) as error:
        # The engine's own: of numbers that it cannot hold, of texts that are no Unicode.
        raise refusal(structured, str(error)) from None


def _engine_text(structured: StructuredOutputs) -> str:
    text = structured.text
    match structured.kind:
        case "json_object":
            return _json_grammar('{"type": "object"}')
        case "json":
            schema = _parse_json(structured)
            if schema is True:
                return _json_grammar("{}")
            if not isinstance(schema, dict):
                raise refusal(structured, "a schema is an object, or true")
            own = schema.get("x-guidance")
            # As it is, where nothing is left out: numbers are not written anew.
            plain = without_vacuous(schema)
            text = text if plain == schema else json.dumps(plain, ensure_ascii=False)
            return _json_grammar(text, own if isinstance(own, dict) else {})
        case "regex":
            if (len(text) - len(text.rstrip("\\"))) % 2:
                raise refusal(structured, "a regular expression does not end in a single backslash")
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(_literal, _choices(structured)))}")
        case "grammar":
            if text.lstrip().startswith("{"):
                # llguidance would read it in its own JSON notation, whose options are not checked here.
                raise refusal(structured, "a Lark grammar begins with a rule or a directive, not with {")
            if (found := _ATTRIBUTE.search(text)) is not None:
                raise refusal(structured, f"the attribute {found[1]} of a rule is not supported")
            return LLMatcher.grammar_from_lark(text)


def schema_rule(schema: dict[str, Any], asked: AskedPatterns | None = None) -> str:
    """A JSON schema as a part of a grammar. ``asked``: one for all of its schemas."""
    schema = without_vacuous(schema, asked)
    own = schema.get("x-guidance")
    fixed = isinstance(own, dict) and own.get("whitespace_flexible") is False
    options = {} if fixed else {"whitespace_pattern": _WHITE_SPACE}
    given = own if isinstance(own, dict) else {}
    return f"%json {json.dumps({**schema, 'x-guidance': {**options, **given, 'lenient': False}}, ensure_ascii=False)}"


def form_rule(structured: StructuredOutputs) -> str:
    """A constraint as a part of a grammar.

    Raises:
        InvalidArgument: its text is not of its kind.
    """
    engine_text(structured)
    match structured.kind:
        case "json_object":
            return schema_rule({"type": "object"})
        case "json":
            schema = _parse_json(structured)
            return schema_rule(schema if isinstance(schema, dict) else {})
        case "regex":
            return f"/{_ENDS_REGEX.sub(_escaped, structured.text)}/"
        case "choice":
            return f"({' | '.join(map(_literal, _choices(structured)))})"
        case "grammar":
            return f"%lark {{\n{structured.text}\n}}"


def _escaped(found: re.Match[str]) -> str:
    return r"\/" if found[0] == "/" else r"\n" if found[0].endswith("\n") else found[0]


def _json_grammar(schema: str, own: Mapping[str, Any] | None = None) -> str:
    """A grammar from a schema, whose ``own`` options (``x-guidance``) may choose other white space, or none.

    They may not choose that unknown keywords are ignored.
    """
    defaults: JsonCompileOptions = {}
    if not own or own.get("whitespace_flexible") is not False:
        defaults["whitespace_pattern"] = _WHITE_SPACE
    return LLMatcher.grammar_from_json_schema(schema, defaults=defaults, overrides={"lenient": False})


def _parse_json(structured: StructuredOutputs) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(structured.text, parse_constant=refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise refusal(structured, f"no JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice: only one of its values could count")
    return found


def _choices(structured: StructuredOutputs) -> list[str]:
    found = _parse_json(structured)
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        raise refusal(structured, "a choice is a list of one or more strings, none of them empty")
    if len(found) > MAX_CHOICES:
        raise refusal(structured, f"a choice has at most {MAX_CHOICES} strings, not {len(found)}")
    return list(dict.fromkeys(found))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
