"""Kernels in C: no parallel region that may have a single thread (`if`) lies around another one.

libgomp keeps its threads for regions that lie in no other. Within one, even of a single thread, it starts new threads for each:
0.1 ms and more, four times a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "services" / "verifier" / "kernels" / "native"
_FUNCTION = re.compile(r"^(?:[\w*]+ )+\*?(\w+)\([^;{}]*\) \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_REGION = re.compile(r"^#pragma omp parallel([^\n]*)\n(.*?)(?=^#pragma omp parallel|\Z)", re.DOTALL | re.MULTILINE)


def functions_of(source: str) -> dict[str, str]:
    """The bodies of all functions, by name."""
    return dict(_FUNCTION.findall(source))


def opening(functions: Mapping[str, str]) -> set[str]:
    """Those that open a parallel region, themselves or by what they call."""
    found = {name for name, body in functions.items() if "#pragma omp parallel" in body}
    while more := {name for name, body in functions.items() if name not in found and found & called_in(body)}:
        found |= more
    return found


def called_in(body: str) -> set[str]:
    return set(re.findall(r"(\w+)\(", body))


def statement(text: str) -> str:
    """The first statement of ``text``: up to its semicolon outside of brackets, or to the end of its block."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "({") - (letter in ")}")
        if not depth and (letter == ";" or letter == "}"):
            return text[: at + 1]
    return text


def nested(functions: Mapping[str, str]) -> Iterator[str]:
    """Functions with a conditional region that another one lies in."""
    opens = opening(functions)
    for name, body in functions.items():
        for clauses, behind in _REGION.findall(body):
            if re.search(r"\bif \(", clauses) and opens & called_in(statement(behind)):
                yield name


def test_no_region_lies_in_a_conditional_one() -> None:
    functions = functions_of("\n".join(path.read_text() for path in sorted(KERNELS.glob("*.[ch]"))))
    assert {"adapt", "outrider_low_rank", "outrider_linear"} <= opening(functions), "functions are not found"
    assert not list(nested(functions))


@pytest.mark.parametrize(("clause", "found"), [(" if (rows > 1)", ["outer"]), ("", [])])
def test_a_planted_one_is_found(clause: str, found: list[str]) -> None:
    source = f"""
static void inner(int rows) {{
#pragma omp parallel for
    for (int row = 0; row < rows; row++) work(row);
}}

static void between(int rows) {{
    inner(rows);
}}

void outer(int rows) {{
#pragma omp parallel for{clause}
    for (int row = 0; row < rows; row++) between(row);
}}
"""
    assert list(nested(functions_of(source))) == found
