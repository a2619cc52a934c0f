"""What a head must know about its target, and whether it was made for it, read from the folders without torch."""

from __future__ import annotations

from pathlib import Path

from services.drafter.heads.files.head_config import TargetShape
from services.model_files.folder import read_json, text_config, tokenizer_digest
from speculation.errors import ConfigurationError

TRAINING = "training.json"


def read_target_shape(folder: Path) -> TargetShape:
    """The shape of the target in ``folder``.

    Raises:
        ConfigurationError: config.json cannot be read, or lacks a size.
    """
    config = text_config(read_json(folder / "config.json", of="target"))

    def number(*names: str) -> int:
        for name in names:
            if type(config.get(name)) is int:
                return int(config[name])
        raise ConfigurationError(f"cannot load the target at {folder}: config.json has no {names[0]}", about=folder)

    return TargetShape(
        hidden_size=number("hidden_size", "n_embd", "d_model"),
        vocab_size=number("vocab_size"),
        num_layers=number("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        max_positions=number("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
        config=config,
    )


def check_tokenizer(folder: Path, target: Path) -> None:
    """Refuse a checkpoint whose training.json records another tokenizer than the target's.

    Raises:
        ConfigurationError: it does.
    """
    recorded = read_json(folder / TRAINING, of="head") if (folder / TRAINING).is_file() else {}
    said = recorded.get("tokenizer_sha256")
    if said is not None and said != (found := tokenizer_digest(target)):
        raise ConfigurationError(
            f"cannot load the head at {folder}: tokenizer_sha256 in {TRAINING} is {str(said)[:12]}...: must be "
            f"{found[:12]}..., that of the target's tokenizer: the head was trained for another",
            about=folder,
        )


def recorded_target(folder: Path) -> str | None:
    """The model that a checkpoint was trained for, by its record; None: it has none."""
    try:
        name = read_json(folder / TRAINING, of="head").get("target")
    except ConfigurationError:
        return None
    return name if isinstance(name, str) else None


def recorded_agreement(folder: Path) -> float | None:
    """The share of first guesses that the target chose on held-out text, by the checkpoint's record; None: it has none."""
    try:
        recorded = read_json(folder / TRAINING, of="head")
        return float(recorded["evaluation"]["domains"]["all"]["agreement"][0])
    except (ConfigurationError, KeyError, IndexError, TypeError, ValueError):
        return None
