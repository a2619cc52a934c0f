"""Makes sources by name, through the function that ``SourceSpec`` names; it is imported only when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from services.drafter.config import DrafterConfig
from services.drafter.interfaces import ModelSource, TextSource
from speculation.errors import InvalidArgument
from speculation.sources import SOURCES


def make_source(name: str, config: DrafterConfig) -> TextSource | ModelSource:
    """A new source of a name that ``check_names`` accepts.

    Raises:
        ConfigurationError: a file that it needs cannot be read.
    """
    module, _, function = SOURCES[name].made_by.partition(":")
    made: TextSource | ModelSource = getattr(importlib.import_module(module), function)(config)
    return made


def check_names(names: Iterable[str]) -> None:
    """Check source names.

    Raises:
        InvalidArgument: a drafter has no such source; lists those that exist.
    """
    for name in names:
        if name not in SOURCES:
            raise InvalidArgument("sources", name, "one of " + ", ".join(sorted(SOURCES)))
