"""Forms that answers must have, what says whether one has it, and tokenizers of a few letters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jsonschema
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from services.structured_outputs.grammars import engine_text, limits, refusal
from services.verifier.grammar.grammar_state import GrammarState
from speculation.types import GrammarKind, StructuredOutputs

_OWNER = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["id"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "owner": {"anyOf": [{"type": "null"}, _OWNER]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "owner", "tags"],
    "additionalProperties": False,
    # Random models write white space without end.
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"(the (quick|lazy) (fox|dog) ){1,2}[0-9]{3}"
CHOICE = ["prompt lookup copies", "prompt", "東京 \N{SLIGHTLY SMILING FACE}", 'a "quoted" \\ one']
LARK = """
start: "let " NAME " = " sum
sum: value | "(" value " + " value ")"
value: NAME | /[0-9]{1,3}/
NAME: /[a-c]{1,3}/
"""


@dataclass(frozen=True)
class Form:
    """A form, and whether a text has it, told by something else than the engine under test."""

    structured: StructuredOutputs
    has: Callable[[str], bool]


def _is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def _is_sum(text: str) -> bool:
    value = r"(?:[a-c]{1,3}|[0-9]{1,3})"
    return re.fullmatch(rf"let [a-c]{{1,3}} = (?:{value}|\({value} \+ {value}\))", text) is not None


FORMS = {
    "json": Form(StructuredOutputs(kind="json", text=json.dumps(SCHEMA)), _is_json),
    "regex": Form(StructuredOutputs(kind="regex", text=REGEX), lambda text: re.fullmatch(REGEX, text) is not None),
    "choice": Form(StructuredOutputs(kind="choice", text=json.dumps(CHOICE)), lambda text: text in CHOICE),
    "grammar": Form(StructuredOutputs(kind="grammar", text=LARK), _is_sum),
}


class _Letters:
    bos_token_id = None

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = [token.encode() for token in tokens]
        self.eos_token_id = len(tokens)
        self.tokens.append(b"<end>")
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        found: list[int] = []
        left = text.encode()
        while left:
            best = max((token for token in self.tokens if left.startswith(token)), key=len, default=b"")
            if not best:
                break
            found.append(self.tokens.index(best))
            left = left[len(best) :]
        return found


def letters(*tokens: str) -> tuple[LLTokenizer, frozenset[int]]:
    """A tokenizer of these tokens and an end-of-text token behind them, which is returned as well."""
    made = _Letters(tokens)
    wrapped = TokenizerWrapper(made)
    return LLTokenizer(wrapped, eos_token=[made.eos_token_id]), frozenset({made.eos_token_id})


def grammar_state(tokenizer: LLTokenizer, eos: frozenset[int], kind: GrammarKind, text: str, **bounds: int) -> GrammarState:
    """The state of a grammar that has seen nothing.

    Args:
        bounds: of the engine's work, other than usual.
    """
    bounded = LLParserLimits(**bounds) if bounds else limits()
    structured = StructuredOutputs(kind=kind, text=text)

    def fresh() -> LLMatcher:
        matcher = LLMatcher(tokenizer, engine_text(structured), log_level=0, limits=bounded)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    return GrammarState(fresh, eos, lambda words: refusal(structured, words))
