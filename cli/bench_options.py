"""Options that the benchmarks share: lists, the folder of --out, a Ray of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from cluster.settings.config import Settings


def check_new_folder(folder: Path) -> None:
    """Raises:
    ConfigurationError: the folder of --out exists.
    """
    if folder.exists():
        raise ConfigurationError(f"--out is {folder}: it exists; name a new folder, so that no result is lost")


def make_folder(folder: Path) -> None:
    """Raises:
    ConfigurationError: the folder of --out cannot be made.
    """
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(f"--out is {folder}: {error.strerror}") from error


def check_own_ray(settings: Settings) -> None:
    """Raises:
    ConfigurationError: a benchmark cannot start a Ray of its own with these settings.
    """
    if "RAY_ADDRESS" in os.environ:
        raise ConfigurationError("--on ray starts a Ray of its own, but RAY_ADDRESS names a running one: unset RAY_ADDRESS")
    if settings.verifier.replicas != 1:
        raise ConfigurationError(f"verifier.replicas is {settings.verifier.replicas}: outrider bench measures one")


def read_names(text: str) -> tuple[str, ...]:
    """Names, comma-separated."""
    return tuple(name.strip() for name in text.split(","))


def read_numbers(option: str, text: str, most: int = 1024) -> tuple[int, ...]:
    """Different numbers from 1 to ``most``, comma-separated.

    Raises:
        ConfigurationError: they are not; names the option.
    """
    numbers = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if not all(1 <= number <= most for number in numbers) or len(set(numbers)) < len(numbers):
        raise ConfigurationError(f"{option} is {text}: must be different numbers from 1 to {most}, comma-separated")
    return numbers
