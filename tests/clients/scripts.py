"""The files of clients: what they need, and how they are run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).parent
# Of what pinned packages need in turn, the newest releases before this day are taken.
BEFORE = "2026-11-25"
_BLOCK = re.compile(r"^(?:#|//) /// script\n((?:(?:#|//).*\n)+?)(?:#|//) ///\n", re.MULTILINE)
_PINNED = {".py": re.compile(r"^([A-Za-z0-9._-]+(?:\[[a-z0-9,_-]+\])?)==([0-9][0-9A-Za-z.]*)$"), ".mjs": re.compile(r"^(@?[a-z0-9/._-]+)@(\d+\.\d+\.\d+)$")}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Script:
    """A client's file.

    Attributes:
        pins: the packages that it needs, with their versions; the client itself is the first one.
        notes: of features, why they fail, or are not there.
    """

    path: Path
    pins: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """By which it is chosen."""
        return self.path.stem.removeprefix("with_")

    @property
    def is_python(self) -> bool:
        return self.path.suffix == ".py"

    @property
    def title(self) -> str:
        """The client's package, without extras."""
        return next(iter(self.pins)).split("[")[0]

    @property
    def version(self) -> str:
        return next(iter(self.pins.values()))

    @cached_property
    def doors(self) -> str:
        """What its first line says."""
        text = self.path.read_text()
        found = re.search(r'^(?:"""|// )(?!///|dep)(.*?)(?:"""|$)', text[text.rindex(" ///\n") + 5 :], re.MULTILINE)
        assert found is not None, self.path
        return found[1].rstrip(".")

    def command(self, cache: Path) -> list[str]:
        """How it is run, once its environment is made, which this does."""
        return [_uv(), "run", "--quiet", "--script", str(self.path)] if self.is_python else self._node(cache)

    def _node(self, cache: Path) -> list[str]:
        folder = cache / "npm" / self.path.stem
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [f"{name}@{version}" for name, version in self.pins.items()]
        mark = folder / "installed"
        if not mark.is_file() or mark.read_text() != " ".join(wanted):
            (folder / "package.json").write_text('{"private": true}')
            install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--before", BEFORE]
            subprocess.run([*install, *wanted], cwd=folder, check=True)
            mark.write_text(" ".join(wanted))
        # Node looks for packages beside the file that asks for them.
        for file in HERE.glob("node/*.mjs"):
            shutil.copy(file, folder)
        return ["node", str(folder / self.path.name)]


def environment(cache: Path) -> dict[str, str]:
    """Variables under which clients are made and run: nothing of this project's own environment, and no keys."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_", "PYTHON"))}
    return kept | {
        "UV_CACHE_DIR": str(cache / "uv"),
        "UV_EXCLUDE_NEWER": BEFORE,
        "UV_PYTHON": sys.executable,
        # Where pip finds PyTorch for CPUs, uv does.
        "UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", "")),
        "SSL_CERT_FILE": os.environ.get("SSL_CERT_FILE", os.environ.get("PIP_CERT", "")),
        "npm_config_cache": str(cache / "npm-cache"),
        # Some would ask their makers' servers, or the hub.
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "no_proxy": "127.0.0.1",
    }


def scripts() -> list[Script]:
    """All of them, in the order of their names.

    Raises:
        ValueError: one does not pin all that it needs.
    """
    return [
        _read(path)
        for path in sorted([*HERE.glob("python/with_*.py"), *HERE.glob("node/with_*.mjs")], key=lambda each: each.stem)
    ]


def _read(path: Path) -> Script:
    found = _BLOCK.search(path.read_text())
    if found is None:
        raise ValueError(f"{path.name} does not say which packages it needs")
    read = tomllib.loads("\n".join(re.sub(r"^(#|//) ?", "", line) for line in found[1].splitlines()))
    pins = {}
    for needed in read["dependencies"]:
        pin = _PINNED[path.suffix].match(needed)
        if pin is None:
            raise ValueError(f"{path.name} does not pin {needed}")
        pins[pin[1]] = pin[2]
    return Script(path, pins, read.get("tool", {}).get("outrider", {}))


def _uv() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise FileNotFoundError("uv is not installed: pip install uv")
    return found
