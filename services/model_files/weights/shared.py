"""Weights that a draft model shares with its target. Its own files leave them out.

Its config.json says so, by the names of modules: each stands for all weights in it, and its value for the target's module
with the same ones. The checksum is over these weights as the target stores them.

    "shared_with_target": {
      "modules": {"model.embed_tokens": "model.embed_tokens", "model.layers.0": "model.layers.0"},
      "sha256": "e5f8..."
    }
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.model_files.folder import read_json
from speculation.errors import ConfigurationError

SHARED = "shared_with_target"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """What a model shares.

    Attributes:
        folder: of the model.
        modules: the target's modules by the model's own, all by name.
        sha256: see ``WeightFiles.digest``.
    """

    folder: Path
    modules: Mapping[str, str]
    sha256: str

    def names(self, own: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
        """The target's names of the shared weights, by the model's own.

        Args:
            own: names of the weights that the model's files hold.
            theirs: names of the target's.

        Raises:
            ConfigurationError: the target lacks a module, or the model's files hold a shared weight; names it.
        """
        there, held = sorted(theirs), set(own)
        found: dict[str, str] = {}
        for module, source in self.modules.items():
            weights = [name for name in there if name.startswith(f"{source}.")]
            if not weights:
                raise ConfigurationError(
                    f"{self.folder} was made for another target: this one has no weights of {source}", about=self.folder
                )
            found |= {module + name.removeprefix(source): name for name in weights}
        if both := sorted(held & found.keys()):
            raise ConfigurationError(
                f"{self.folder} holds {both[0]}, which {SHARED} in its config.json says is the target's", about=self.folder
            )
        return found


def read_shared(folder: Path) -> SharedWeights | None:
    """What the model in ``folder`` shares with its target; None: nothing.

    Raises:
        ConfigurationError: config.json cannot be read, or says it in another form.
    """
    content = read_json(folder / "config.json").get(SHARED)
    if content is None:
        return None
    where = f"{folder / 'config.json'}: {SHARED}"
    if not isinstance(content, dict) or content.keys() != {"modules", "sha256"}:
        raise ConfigurationError(f"{where} must hold modules and sha256, and nothing else", about=where)
    modules: Any = content["modules"]
    if not isinstance(modules, dict) or not modules or not all(_named(each) for each in (*modules, *modules.values())):
        raise ConfigurationError(
            "modules must hold at least one name of a module, with the target's name of it", field=where
        )
    if not isinstance(content["sha256"], str) or not _SHA256.fullmatch(content["sha256"]):
        raise ConfigurationError(
            place=where, field="sha256", value=f"{content['sha256']!r}", allowed="64 hexadecimal digits"
        )
    return SharedWeights(folder, modules, content["sha256"])


def _named(name: object) -> bool:
    return isinstance(name, str) and bool(name)
