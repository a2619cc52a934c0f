"""A model's tokenizer through transformers, for models whose ``tokenizer.json`` alone does not define its behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.model_files.byte_letters import TokenBytes
from services.model_files.folder import check_vocabulary, read_json, reading
from services.router.templates import ChatTemplate
from services.router.tokenizer_file import longest_token, special_ids
from speculation.errors import ConfigurationError


class TransformersTokenizer:
    """Implements ``services.router.tokens.Backend``.

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
        self._tokenizer: PreTrainedTokenizerFast = tokenizer
        self._special_ids = special_ids(tokenizer.backend_tokenizer)
        self._bytes = TokenBytes(tokenizer.backend_tokenizer)
        self.longest_token = longest_token(tokenizer.backend_tokenizer)
        self._template = None
        if tokenizer.chat_template:
            with reading(f"read the chat template at {folder}", about=folder):
                self._template = ChatTemplate(tokenizer.get_chat_template(), tokenizer.special_tokens_map)

    @property
    def template(self) -> ChatTemplate | None:
        return self._template

    def encode(self, text: str, *, special: bool = True) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not special))

    def spell(self, token: int) -> bytes:
        return self._bytes.spell(token)
