"""All sources by name, imported only when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.drafter.config import DrafterConfig
from services.drafter.source import Source
from speculation.errors import InvalidArgument


def _autoregressive(config: DrafterConfig) -> Source:
    from services.drafter.autoregressive import Autoregressive

    return Autoregressive()


def _prompt_lookup(config: DrafterConfig) -> Source:
    from services.drafter.prompt_lookup import PromptLookup

    return PromptLookup(config.prompt_lookup)


def _suffix(config: DrafterConfig) -> Source:
    from services.drafter.suffix import Suffix

    return Suffix(config.suffix)


def _recycling(config: DrafterConfig) -> Source:
    from services.drafter.recycling import Recycling

    return Recycling(config.recycling)


SOURCES: dict[str, Callable[[DrafterConfig], Source]] = {
    "autoregressive": _autoregressive,
    "prompt_lookup": _prompt_lookup,
    "recycling": _recycling,
    "suffix": _suffix,
}


def check_names(names: Iterable[str]) -> None:
    """Check source names.

    Raises:
        InvalidArgument: one is unknown; lists the known ones.
    """
    for name in names:
        if name not in SOURCES:
            raise InvalidArgument("sources", name, "one of " + ", ".join(sorted(SOURCES)))
