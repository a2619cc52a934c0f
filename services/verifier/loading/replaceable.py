"""Whether the weights in a folder may take the place of those that are served, as far as files say without being loaded."""

from __future__ import annotations

from pathlib import Path

from services.model_files.folder import known_tokenizer
from services.model_files.generation_config import FILE, GenerationConfig, read_generation_config
from services.verifier.config import TargetConfig
from services.verifier.loading.model_config import check_files, read_config
from speculation.errors import ConfigurationError, spelled

# What config.json says of who wrote it, and of how it was stored.
_OF_THE_FILE = {"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}


def check_supported(config: TargetConfig) -> None:
    """Check that the weights of a target can be replaced at all.

    Raises:
        ConfigurationError: they cannot; names the setting.
    """
    if config.device != "cpu":
        raise ConfigurationError(
            field="verifier.device",
            value=config.device,
            given="and weights are replaced while serving on a CPU alone so far",
            allowed="cpu there",
        )
    if config.draft_adapter is not None:
        raise ConfigurationError(
            field="drafter.models",
            value=config.draft_adapter,
            allowed="without this adapter: weights beside it are not replaced so far, since it is tried before it serves",
        )


def check_replaceable(config: TargetConfig, served: TargetConfig, generation: GenerationConfig) -> None:
    """Check that the folder of ``config`` holds the model of ``served`` but for the numbers of its weights.

    Args:
        generation: the served model's.

    Raises:
        ConfigurationError: it does not, or its files are not complete.
    """
    folder, own = Path(config.model_path), Path(served.model_path)
    check_files(config)
    found, wanted = read_config(config).to_dict(), read_config(served).to_dict()
    for name in sorted(found.keys() | wanted.keys()):
        if name not in _OF_THE_FILE and not name.startswith("_") and found.get(name) != wanted.get(name):
            raise ConfigurationError(
                field=name,
                value=found.get(name, "unset"),
                allowed=f"{spelled(wanted.get(name, 'unset'))}, as of the model that is served",
                place=folder / "config.json",
            )
    if (folder / "tokenizer.json").is_file() and known_tokenizer(folder) != known_tokenizer(own):
        raise _other(folder / "tokenizer.json", "tokenizer")
    if served.generation_config == "auto" and (folder / FILE).is_file():
        given = read_generation_config(
            folder, "auto", served.override_generation_config, vocab_size=read_config(served).get_text_config().vocab_size
        )
        named = ("defaults", "processors", "eos_token_ids")
        if any(getattr(given, name) != getattr(generation, name) for name in named):
            raise _other(folder / FILE, "generation config")


def _other(file: Path, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{file} is another {what} than that of the model that is served, which only a new start can change: leave it out, "
        "or correct it",
        about=file,
    )
