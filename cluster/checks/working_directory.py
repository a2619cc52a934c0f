"""Checks that the working directory holds nothing that Python would import instead of a library.

Ray's workers look for modules there first. A file such as requests.py would break them far from here, in long tracebacks.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from speculation.errors import ConfigurationError

_OWN = "outrider-server"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def check_working_directory(folder: Path | None = None) -> None:
    """Check the names of the modules in ``folder``; None: in the working directory.

    Raises:
        ConfigurationError: one is the name of a module of Python's or of a library that the service needs.
    """
    place = (folder or Path.cwd()).resolve()
    found = sorted(file for file in place.glob("*.py")) + sorted(file.parent for file in place.glob("*/__init__.py"))
    others = [path for path in sys.path if Path(path or ".").resolve() != place]
    hidden = [file for file in found if file.stem in sys.stdlib_module_names or _is_elsewhere(file, others)]
    if not hidden:
        return
    needed = {*sys.stdlib_module_names, *_modules_of_libraries()}
    if wrong := next((file for file in hidden if file.stem in needed), None):
        raise ConfigurationError(
            f"the working directory holds {wrong.name}, which Python would import instead of its own module or a library's "
            f"of the name {wrong.stem}; start the service in another folder, or rename it",
            about=place,
        )


def _is_elsewhere(file: Path, paths: list[str]) -> bool:
    spec = PathFinder.find_spec(file.stem, paths)
    origin = None if spec is None else spec.origin
    return origin is not None and Path(origin).resolve() not in (file, file / "__init__.py")


def _modules_of_libraries() -> set[str]:
    """Names of the modules of every library that Outrider needs, however indirectly."""
    needed, left = set(), [_OWN]
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in needed:
            continue
        needed.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        # Not what an extra alone asks for: those of tests are many.
        plain = [each for each in requirements if "extra ==" not in each]
        left += [match[0] for each in plain if (match := _NAME.match(each)) is not None]
    by_module = metadata.packages_distributions()
    return {module for module, names in by_module.items() if {each.lower().replace("_", "-") for each in names} & needed}
