"""Refuses weights that are only there as pickles, which are programs."""

from __future__ import annotations

from pathlib import Path

from speculation.errors import ConfigurationError

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def refuse_pickles(folder: Path) -> None:
    """Refuse a folder whose weights are only there as pickles.

    Raises:
        ConfigurationError: says how to convert them.
    """
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    if pickled:
        raise ConfigurationError(
            f"make safetensors of it once, with `outrider train convert {folder}`",
            place=f"cannot load the head at {folder}",
            field=pickled[0],
            value="pickled",
            given="which can hold programs and is never opened when serving",
        )
