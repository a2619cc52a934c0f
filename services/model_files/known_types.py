"""The model types that the installed transformers knows.

They are read from literal tables in its source, because importing it takes seconds that ``outrider plan`` should not spend.
If a release keeps the tables elsewhere, nothing is known in advance, and loading the model decides.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownTypes:
    """Values of ``model_type`` in ``config.json``.

    Attributes:
        all: all known types.
        causal: types with a causal language model.
        masked: types with a masked language model; many have both, and a setting chooses.
        seq2seq: encoder-decoders.
        multimodal: types that take images or sound beside text.
    """

    all: frozenset[str]
    causal: frozenset[str]
    masked: frozenset[str]
    seq2seq: frozenset[str]
    multimodal: frozenset[str]


@cache
def known_types() -> KnownTypes | None:
    """The types of the installed transformers; None: unknown."""
    found: dict[str, frozenset[str]] = {}
    for file in ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py"):
        for name, types in _tables(f"models/auto/{file}"):
            found[name] = found.get(name, frozenset()) | types
    try:
        return KnownTypes(
            all=frozenset().union(*(types for name, types in found.items() if name.startswith(("CONFIG_", "MODEL_")))),
            causal=found["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"],
            masked=found["MODEL_FOR_MASKED_LM_MAPPING_NAMES"],
            seq2seq=found["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"],
            multimodal=found["MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"] | found["MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"],
        )
    except KeyError:
        return None


@cache
def known_gguf_architectures() -> frozenset[str]:
    """Values of ``general.architecture`` in GGUF files that transformers reads; empty: unknown."""
    names = ("GGUF_CONFIG_MAPPING", "GGUF_ARCHS")
    files = ("integrations/ggml.py", "integrations/gguf/gguf_conversion_mapping.py")
    found = [types for file in files for name, types in _tables(file) if name in names]
    return frozenset().union(*found)


def transformers_version() -> str:
    """Name and version for error messages."""
    return f"transformers {version('transformers')}"


def _tables(file: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Name and string keys of every table in a source file."""
    spec = find_spec("transformers")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        try:
            tree = ast.parse((Path(folder) / file).read_bytes())
        except (OSError, SyntaxError):
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield node.targets[0].id, frozenset(_keys(node.value))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and (name := _updated(node.value)):
                yield name, frozenset(_keys(node.value))


def _updated(call: ast.Call) -> str | None:
    """The table that ``TABLE.update(...)`` extends; None for any other call."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "update" and isinstance(function.value, ast.Name):
        return function.value.id
    return None


def _keys(value: ast.expr) -> Iterator[str]:
    """String keys of a dictionary literal, of ``OrderedDict([(key, ...), ...])``, or of one nested in another call."""
    if isinstance(value, ast.Dict):
        entries = list(value.keys)
    elif isinstance(value, ast.List):
        entries = [entry.elts[0] for entry in value.elts if isinstance(entry, ast.Tuple) and entry.elts]
    elif isinstance(value, ast.Call):
        for argument in (*value.args, *(keyword.value for keyword in value.keywords)):
            yield from _keys(argument)
        return
    else:
        return
    for key in entries:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value
