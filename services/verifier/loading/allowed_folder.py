"""Which folders a caller may have a verifier read while it serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speculation.errors import InvalidArgument


def allowed_folder(field: str, named: str, setting: str, allowed: Sequence[Path]) -> Path:
    """The folder that a caller names.

    Args:
        field: by which it is named.
        setting: that which allows the folders, some of which must hold it.

    Raises:
        InvalidArgument: it is no folder, or it or one of its files lies elsewhere than allowed.
    """
    roots = [root.expanduser().resolve() for root in allowed]
    within = f"a folder in one of {setting} ({', '.join(map(str, roots)) or 'which names none'}), by its absolute path"
    path = Path(named)
    # Resolved, as links and dots may lead elsewhere.
    found = path.resolve()
    if not path.is_absolute() or not any(found.is_relative_to(root) for root in roots) or not found.is_dir():
        raise InvalidArgument(field, named, within)
    for file in found.iterdir():
        if not any(file.resolve().is_relative_to(root) for root in roots):
            raise InvalidArgument(field, named, f"{within}, whose files lie there, too: {file.name} does not")
    return found
