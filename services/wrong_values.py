"""What a wrong value should have been: the nearest name, and a setting's bounds in words that its user knows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from services.patterns import WORDS as PATTERN_WORDS

_LIST = "a list, such as [one, two]"
_MAPPING = "a mapping, such as {name: value}"
# A bound stands between < and >.
_WORDS = {
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "string_type": "a text",
    "path_type": "a path",
    "missing": "set",
    "greater_than_equal": "at least <ge>",
    "greater_than": "more than <gt>",
    "less_than_equal": "at most <le>",
    "less_than": "less than <lt>",
}
# Characters of a name that may be a known one misspelt: comparing takes their square.
_LONGEST_NAME = 64
# By which share of their letters two names must be alike, for difflib.
_NEAR = 0.7
_QUOTED = re.compile(r"'([^']*)'")


def allowed(problem: Mapping[str, Any]) -> str:
    """What the value must be; empty: pydantic's own sentence says it best."""
    context: dict[str, Any] = problem.get("ctx", {})
    if problem["type"] == "literal_error":
        known: list[str] = _QUOTED.findall(context["expected"])
        if len(known) == 1:
            return known[0]
        return f"one of {', '.join(known)}{did_you_mean(str(problem['input']), known)}"
    if problem["type"] == "string_pattern_mismatch":
        return PATTERN_WORDS.get(context["pattern"], f"of the form {context['pattern']}")
    said = _WORDS.get(problem["type"], "")
    for name, bound in context.items():
        said = said.replace(f"<{name}>", f"{bound}")
    return said


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names as a question behind a refusal; empty: none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR) if len(name) <= _LONGEST_NAME else []
    return f" (did you mean {near[0]}?)" if near else ""
