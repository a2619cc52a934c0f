"""What a model's folder says of its tokenizer, for those who set one up elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.model_files.folder import read_json, reading
from services.router.named_templates import template_sources

# Places on some machine.
_PLACES = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file")
_CLASS = "PreTrainedTokenizerFast"


def tokenizer_info(folder: Path) -> dict[str, Any]:
    """The settings of tokenizer_config.json, with the chat template that counts.

    Raises:
        ConfigurationError: a file is damaged; names it.
    """
    file = folder / "tokenizer_config.json"
    with reading(f"read the tokeniser's settings at {folder}", about=folder):
        settings = read_json(file, "tokeniser") if file.is_file() else {}
        sources = template_sources(folder, settings)
    found = {name: value for name, value in settings.items() if name not in (*_PLACES, "chat_template")}
    if sources:
        named = [{"name": name, "template": source} for name, source in sources.items()]
        found["chat_template"] = sources["default"] if set(sources) == {"default"} else named
    return {"tokenizer_class": _CLASS, **found}
