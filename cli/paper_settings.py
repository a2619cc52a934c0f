"""Settings of ``outrider paper``: which may be given, and what of them a folder of results remembers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from cluster.settings.config import Settings
from speculation.errors import ConfigurationError

# What has an option of its own.
_OPTIONS = ("model", "drafter.models")


def check_settings(given: Sequence[str], decided: Sequence[str]) -> None:
    """Refuse settings that the experiments decide themselves.

    Args:
        given: of ``--set``, such as ``verifier.device=cuda``.
        decided: in the same form.

    Raises:
        ConfigurationError: there is one.
    """
    taken = {*_OPTIONS, *(each.partition("=")[0] for each in decided)}
    for each in given:
        name = each.partition("=")[0]
        if any(other == name or other.startswith(f"{name}.") for other in taken):
            allowed = "a setting that no row decides; --model and --drafter name models"
            raise ConfigurationError(field="--set", verb="", value=each, allowed=allowed)


def where_computed(settings: Settings) -> dict[str, str | None]:
    """Where and in which numbers models compute, also where the environment says so; None: as usual."""
    found, usual = dict[str, str | None](), Settings()
    for part, name in product(("verifier", "drafter"), ("device", "dtype")):
        value, default = (getattr(getattr(each, part), name) for each in (settings, usual))
        found[f"{part}.{name}"] = None if value == default else str(value)
    return found
