"""Which layers the names of compressed-tensors mean."""

from __future__ import annotations

import re
from collections.abc import Iterable

# The names of classes that stand for all layers that are quantised.
_CLASSES = ("Linear",)


def meant(layer: str, targets: Iterable[str]) -> bool:
    """Whether one of the targets names the layer itself: by its name, or by ``re:`` and a pattern of its beginning."""
    return any(
        re.match(target.removeprefix("re:"), layer) is not None if target.startswith("re:") else target == layer
        for target in targets
    )


def meant_by_class(targets: Iterable[str]) -> bool:
    """Whether one of the targets names all linear layers."""
    return any(target in _CLASSES for target in targets)
