"""Tensors of verifier and drafter name their type: transformers changes torch's own for the process while it makes a model.

A buffer of the default type that compiled code writes to is half as large as it thinks meanwhile, and its numbers are rounded.
"""

from __future__ import annotations

import ast
from pathlib import Path

_HERE = Path(__file__).parents[2]
_MAKERS = {"empty", "full", "linspace", "ones", "rand", "randn", "zeros"}


def untyped(source: str) -> list[str]:
    """The calls that leave the type of a new tensor to torch's default."""
    return [
        ast.unparse(call)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in _MAKERS) == ("torch", True)
        and not any(keyword.arg == "dtype" for keyword in call.keywords)
    ]


def test_tensors_of_the_verifier_and_the_drafter_name_their_type() -> None:
    files = [file for room in ("verifier", "drafter", "model_files") for file in (_HERE / "services" / room).rglob("*.py")]
    found = {str(file.relative_to(_HERE)): untyped(file.read_text()) for file in files}
    assert {file: calls for file, calls in found.items() if calls} == {}


def test_a_tensor_without_a_type_is_seen() -> None:
    assert untyped("a = torch.empty(3, device=x)\nb = torch.zeros(3, dtype=torch.float32)\nc = rows.new_empty(3)") == [
        "torch.empty(3, device=x)"
    ]
