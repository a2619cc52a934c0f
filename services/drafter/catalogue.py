"""All sources by name, imported only when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.drafter.config import DrafterConfig
from services.drafter.source import Source, WalkedSource
from speculation.errors import InvalidArgument


def _autoregressive(config: DrafterConfig) -> Source:
    from services.drafter.autoregressive import Autoregressive

    return Autoregressive()


def _prompt_lookup(config: DrafterConfig) -> Source:
    from services.drafter.prompt_lookup import PromptLookup

    return PromptLookup(config.prompt_lookup)


def _anpd(config: DrafterConfig) -> Source:
    from services.drafter.anpd import Anpd

    return Anpd(config.anpd)


def _lookahead(config: DrafterConfig) -> Source:
    from services.drafter.lookahead import Lookahead

    return Lookahead(config.lookahead)


def _spectra_core(config: DrafterConfig) -> Source:
    from services.drafter.spectra import CORE, Spectra

    return Spectra(config.spectra, name=CORE)


def _spectra(config: DrafterConfig) -> Source:
    from services.drafter.spectra import FULL, Spectra

    return Spectra(config.spectra, name=FULL)


def _retrieval(config: DrafterConfig) -> Source:
    from services.drafter.retrieval import Retrieval

    return Retrieval("retrieval")


def _semantic(config: DrafterConfig) -> Source:
    from services.drafter.semantic import Semantic

    return Semantic()


def _suffix(config: DrafterConfig) -> WalkedSource:
    from services.drafter.suffix import Suffix

    return Suffix(config.suffix)


def _recycling(config: DrafterConfig) -> WalkedSource:
    from services.drafter.recycling import Recycling
    from speculation.successor_table import read

    snapshot = config.recycling.snapshot
    return Recycling(config.recycling, warm=None if snapshot is None else read(snapshot))


# Sources that propose trees of their own.
SOURCES: dict[str, Callable[[DrafterConfig], Source]] = {
    "anpd": _anpd,
    "autoregressive": _autoregressive,
    "lookahead": _lookahead,
    "prompt_lookup": _prompt_lookup,
    "retrieval": _retrieval,
    "semantic": _semantic,
    "spectra": _spectra,
    "spectra_core": _spectra_core,
}
# Sources that say what follows any path.
WALKED: dict[str, Callable[[DrafterConfig], WalkedSource]] = {
    "recycling": _recycling,
    "suffix": _suffix,
}


def check_names(names: Iterable[str]) -> None:
    """Check source names.

    Raises:
        InvalidArgument: one is unknown; lists the known ones.
    """
    known = SOURCES.keys() | WALKED.keys()
    for name in names:
        if name not in known:
            raise InvalidArgument("sources", name, "one of " + ", ".join(sorted(known)))
