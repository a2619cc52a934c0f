"""A model's tokenizer through transformers, for models whose ``tokenizer.json`` alone does not define its behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typing_extensions import override

from services.model_files.folder import check_vocabulary, read_json, reading
from services.router.named_templates import ChatTemplates
from services.router.tokenizer_file import FileTokenizer
from speculation.errors import ConfigurationError


class TransformersTokenizer(FileTokenizer):
    """Implements ``services.router.tokenizer_backend.Backend`` on transformers.

    Raises:
        ConfigurationError: the tokeniser cannot be loaded, or is not a fast one.
    """

    def __init__(self, model_path: str) -> None:
        folder = Path(model_path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                read_json(folder / name, "tokeniser")
        where = f"load the tokeniser at {folder}"
        if not (folder / "tokenizer.json").is_file():
            where += " without a tokenizer.json"
        with reading(where):
            tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigurationError(
                f"the tokeniser at {model_path} has no tokenizer.json; convert it to a fast tokeniser", about=model_path
            )
        with reading(f"load the tokeniser at {folder}", about=folder):
            own = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
            check_vocabulary(folder, max(own.values(), default=-1))
        given = tokenizer.chat_template or {}
        with reading(f"read the chat template at {folder}", about=folder):
            sources = given if isinstance(given, dict) else {"default": given}
            templates = ChatTemplates(sources, tokenizer.special_tokens_map)
        super().__init__(tokenizer.backend_tokenizer, templates)
        self._whole: PreTrainedTokenizerFast = tokenizer

    @override
    def encode(self, text: str, *, special: bool = True) -> Sequence[int]:
        ids: Sequence[int] = self._whole(text, add_special_tokens=special)["input_ids"]
        return ids

    @override
    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self._whole.decode(tokens, skip_special_tokens=not special))
