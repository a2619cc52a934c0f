"""What kernels take of a Hopper GPU, compiled by the installed Triton: ``python -m tests.kernels.compiled_resources``.

Prints one JSON object per kernel: registers of a thread, bytes of its stack (what has no room in registers), copies of 16 bytes
in the background, bytes of shared memory. ``--write`` keeps them in compiled_resources.json, in place of what this version of
Triton had there; GROUP and ``--kernels`` say of what, and print alone. Run it with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import triton

from tests.kernels.compile_kernels import KERNELS, compiled
from tests.kernels.triton_compiler import compile_for, taken_by

FILE = Path(__file__).with_suffix(".json")
HOPPER = 90
# One row, a tree, many requests; within a segment of keys, and in several.
ROWS = (1, 64, 512)


class Shape(NamedTuple):
    """A decoder layer of a model: all of it, or what one of ``ranks`` has of it."""

    kind: str
    sizes: dict[str, int]
    ranks: int = 1


SHAPES = {
    "Llama 3 8B": Shape("llama", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                                  "num_key_value_heads": 8, "head_dim": 128}),
    "Qwen3 8B": Shape("qwen3", {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                                "num_key_value_heads": 8, "head_dim": 128}),
    # The output product has 1,024 columns of 8,192 terms.
    "Llama 3 70B, a rank of eight": Shape("llama", {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
                                                    "num_key_value_heads": 8, "head_dim": 128}, ranks=8),
}  # fmt: skip
GROUPS = ("kernels", *SHAPES)
Figures = dict[str, int]


def known() -> dict[str, dict[str, dict[str, Figures]]]:
    """What the file has: by version of Triton, group and kernel."""
    read: dict[str, dict[str, dict[str, Figures]]] = json.loads(FILE.read_text())
    return read


def measured(group: str, names: list[str] | None = None) -> Iterator[tuple[str, Figures]]:
    """Kernels of a group, of ``KERNELS`` only ``names`` if given, and what they take."""
    for name, compile_it in _of_shape(SHAPES[group]) if group in SHAPES else _of_kernels(names or list(KERNELS)):
        yield name, taken_by(compile_it())


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    asked.add_argument("--kernels", nargs="+", choices=list(KERNELS), help="of the group kernels")
    asked.add_argument("--write", action="store_true")
    given = asked.parse_args()
    compile_for(HOPPER)
    found: dict[str, dict[str, Figures]] = {}
    for group in given.groups or GROUPS:
        for name, figures in measured(group, given.kernels):
            found.setdefault(group, {})[name] = figures
            print(json.dumps({"group": group, "kernel": name, **figures}), flush=True)
    if given.write:
        if given.groups or given.kernels:
            asked.error("--write keeps all groups")
        before = known() if FILE.exists() else {}
        FILE.write_text(_written(dict(sorted({**before, triton.__version__: found}.items()))))


def _of_kernels(names: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in names:
        yield name, partial(compiled, name)


def _of_shape(shape: Shape) -> Iterator[tuple[str, Callable[[], Any]]]:
    # Takes longer to import than a kernel to compile.
    from tests.kernels.compiled_launches import layer_launches

    once = set()
    for launch in layer_launches(shape.kind, shape.sizes, ROWS, ranks=shape.ranks):
        constants = [name if one is True else f"{name}={one}" for name, one in launch.constants.items() if one]
        if (name := " ".join([launch.kernel, *constants])) not in once:
            once.add(name)
            yield name, launch.compiled


def _written(sections: dict[str, dict[str, dict[str, Figures]]]) -> str:
    """As JSON with a line for each kernel."""

    def nested(inner: dict[str, Any], depth: int) -> str:
        if depth == 3:
            return json.dumps(inner)
        space = "  " * (depth + 1)
        lines = [f"{space}{json.dumps(name)}: {nested(one, depth + 1)}" for name, one in inner.items()]
        return "{\n" + ",\n".join(lines) + "\n" + "  " * depth + "}"

    return nested(sections, 0) + "\n"


if __name__ == "__main__":
    main()
