"""Options that the benchmarks share: lists, the folder of --out, a Ray of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from services.whole_number import whole_number
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from cluster.settings.config import Settings


def check_new_folder(folder: Path) -> None:
    """Raises:
    ConfigurationError: the folder of --out exists.
    """
    if folder.exists():
        raise ConfigurationError("it exists; name a new folder, so that no result is lost", field="--out", value=folder)


def make_folder(folder: Path) -> None:
    """Raises:
    ConfigurationError: the folder of --out cannot be made.
    """
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(f"{error.strerror}", field="--out", value=folder) from error


def check_own_ray(settings: Settings) -> None:
    """Raises:
    ConfigurationError: a benchmark cannot start a Ray of its own with these settings.
    """
    if "RAY_ADDRESS" in os.environ:
        raise ConfigurationError(
            "--on ray starts a Ray of its own, but RAY_ADDRESS names a running one: unset RAY_ADDRESS", about="--on"
        )
    if settings.verifier.replicas != 1:
        raise ConfigurationError("outrider bench measures one", field="verifier.replicas", value=settings.verifier.replicas)


def read_names(text: str) -> tuple[str, ...]:
    """Names, comma-separated."""
    return tuple(name.strip() for name in text.split(","))


def read_numbers(option: str, text: str, most: int = 1024) -> tuple[int, ...]:
    """Different numbers from 1 to ``most``, comma-separated.

    Raises:
        ConfigurationError: they are not; names the option.
    """
    read = [whole_number(part.strip(), 1, most) for part in text.split(",")]
    numbers = tuple(number for number in read if number is not None)
    if len(set(numbers)) < len(read):
        raise ConfigurationError(field=option, value=text, allowed=f"different numbers from 1 to {most}, comma-separated")
    return numbers
