"""A model's tokenizer from ``tokenizer.json`` alone, for models where this gives the same result as transformers.

transformers rebuilds some tokenizers from the file's vocabulary, and adds tokens that only other files name. For such models
``open_file`` returns None, never a tokenizer that might differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.model_files.byte_letters import TokenBytes
from services.model_files.folder import check_vocabulary, read_json, reading
from services.router.named_templates import ChatTemplates, special_tokens, template_sources, text_of

# With these classes transformers uses the file unchanged; with LlamaTokenizer only if the file works on bytes.
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
# Model types for which transformers overrides the class or repairs the file.
_SPECIAL_TYPES = (
    "hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2",
    "ministral", "ministral3", "mistral", "mistral3", "mixtral", "pixtral", "voxtral",
)  # fmt: skip
# Each of these settings makes a tokenizer do something that its file does not say.
_UNKNOWN_SETTINGS = (
    "auto_map",
    "fast_tokenizer_files",
    "split_special_tokens",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
)
# Tokens that are decoded in microseconds.
_FEW = 256
_ADDED_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
# Places on some machine.
_PLACES = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file")
_CLASS = "PreTrainedTokenizerFast"


class FileTokenizer:
    """Implements ``services.router.tokenizer_backend.Backend`` on the ``tokenizers`` library."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates) -> None:
        # The file's truncation and padding are settings for training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self.templates = templates
        added = tokenizer.get_added_tokens_decoder()
        self.special_names = {token.content: number for number, token in added.items() if token.special}
        self.added_names = {token.content: number for number, token in added.items()}
        self.special_ids = frozenset(self.special_names.values())
        # Tokenisers write a character as one or more characters.
        self.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, special: bool = True) -> Sequence[int]:
        # Unlike encode, this leaves Python's lock to others meanwhile; and nobody reads the offsets that it leaves out.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return encoded.ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        if len(tokens) <= _FEW:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=not special))
        # Without Python's lock, too; not worth its start where an answer is decoded token by token.
        return self._tokenizer.decode_batch([tokens], skip_special_tokens=not special)[0]

    def id_of(self, name: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(name)
        return found

    def spell(self, token: int) -> bytes:
        return self._bytes.spell(token)


def open_file(folder: Path) -> FileTokenizer | None:
    """The tokenizer in ``folder``; None if only transformers knows how it behaves.

    Raises:
        ConfigurationError: a file is damaged; names it.
    """
    file = folder / "tokenizer.json"
    if not file.is_file() or not (folder / "tokenizer_config.json").is_file():
        return None
    with reading(f"load the tokeniser at {folder}", about=folder):
        content, settings = read_json(file, "tokeniser"), read_json(folder / "tokenizer_config.json", "tokeniser")
        model = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        if not _is_plain(content, settings, model) or not _adds_nothing(folder, content, settings):
            return None
        with reading(f"load the tokeniser {file}", about=file):
            tokenizer = Tokenizer.from_file(str(file))
        check_vocabulary(folder, max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1))
    with reading(f"read the chat template at {folder}", about=folder):
        templates = ChatTemplates(template_sources(folder, settings), special_tokens(settings))
    return FileTokenizer(tokenizer, templates)


def _is_plain(content: dict[str, Any], settings: dict[str, Any], model: dict[str, Any]) -> bool:
    """Whether transformers uses the file unchanged."""
    if any(settings.get(name) for name in _UNKNOWN_SETTINGS) or model.get("model_type") in _SPECIAL_TYPES:
        return False
    # With BPE, transformers ignores clean_up_tokenization_spaces.
    if settings.get("clean_up_tokenization_spaces") and content.get("model", {}).get("type") != "BPE":
        return False
    name = settings.get("tokenizer_class")
    return name in _PLAIN_CLASSES or (name in _LLAMA_CLASSES and _works_on_bytes(content))


def _works_on_bytes(content: dict[str, Any]) -> bool:
    parts = (content.get("pre_tokenizer"), content.get("decoder"))
    return any('"ByteLevel"' in json.dumps(part) for part in parts)


def _adds_nothing(folder: Path, content: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether every token named in other files is in tokenizer.json, with the same properties."""
    # Older files, which apply only if tokenizer_config.json has no added_tokens_decoder.
    older = any((folder / name).is_file() for name in ("added_tokens.json", "special_tokens_map.json"))
    if older and "added_tokens_decoder" not in settings:
        return False
    own = {entry["content"]: entry for entry in content.get("added_tokens", ())}
    for number, entry in (settings.get("added_tokens_decoder") or {}).items():
        known = own.get(entry.get("content")) if isinstance(entry, dict) else None
        if known is None or known["id"] != int(number):
            return False
        if any(entry.get(field) != known[field] for field in _ADDED_FIELDS):
            return False
    # The padding settings in the file name a token, too.
    if content.get("padding") and "pad_token" not in settings:
        return False
    return all(name in own for name in _named_tokens(settings))


def _named_tokens(settings: dict[str, Any]) -> Iterator[str | None]:
    for key, value in settings.items():
        if key.endswith("_token") and value is not None and not isinstance(value, bool):
            yield text_of(value)
    for key in ("extra_special_tokens", "additional_special_tokens"):
        listed = settings.get(key) or ()
        for value in listed.values() if isinstance(listed, dict) else listed:
            yield text_of(value)


def tokenizer_info(folder: Path) -> dict[str, Any]:
    """The settings of tokenizer_config.json, with the chat template that counts: what others set it up with.

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
