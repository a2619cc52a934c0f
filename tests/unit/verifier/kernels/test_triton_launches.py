"""Every launch of a Triton kernel names the options by which all of them are compiled."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import services.verifier.kernels as kernels
from tests.running.finalizers import no_finalizers

LAUNCHING = sorted((Path(kernels.__path__[0]) / "triton").glob("*.py"))


def launches(text: str) -> Iterator[ast.Call]:
    """Calls of the form ``kernel[grid](...)``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
            yield node


def without_options(text: str) -> list[int]:
    """Lines of launches that do not name them."""
    return [
        call.lineno
        for call in launches(text)
        if not any(each.arg is None and ast.unparse(each.value) == "COMPILED" for each in call.keywords)
    ]


def test_no_launch_lets_the_compiler_contract_products_and_sums() -> None:
    texts = {file.name: file.read_text() for file in LAUNCHING}
    with no_finalizers():
        assert sum(len(list(launches(text))) for text in texts.values()) >= 10
        assert {name: lines for name, text in texts.items() if (lines := without_options(text))} == {}
        assert without_options("kernel[(1,)](made, **COMPILED)\nkernel[(1,)](made, BLOCK=1)") == [2]
