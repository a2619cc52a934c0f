"""The bytes of tokens: the letters that stand for them in vocabularies, and the bytes that a token adds to a text."""

from __future__ import annotations

import json
import re
from functools import cache

from tokenizers import Tokenizer


@cache
def byte_of_letter() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for letters from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


# Spellings of bytes in vocabularies: "<0xE6>", and GPT-2's alphabet of printable characters.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "▁"


class TokenBytes:
    """Spells the tokens of a tokenizer.

    Which of the two spellings its vocabulary uses is read from its decoder; a tokenizer that uses neither spells a token as
    it decodes it alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"), ensure_ascii=False)
        self._by_alphabet = '"ByteLevel"' in decoder
        self._by_number = '"ByteFallback"' in decoder or _METASPACE in decoder

    def spell(self, token: int) -> bytes:
        """The bytes of ``token``; those of its name for a special one, none for one that the vocabulary lacks."""
        if (added := self._added.get(token)) is not None:
            return added.encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._by_alphabet:
            alphabet = byte_of_letter()
            return b"".join(bytes([alphabet[char]]) if char in alphabet else char.encode() for char in name)
        if self._by_number:
            number = _BYTE.fullmatch(name)
            return bytes([int(number[1], 16)]) if number else name.replace(_METASPACE, " ").encode()
        return str(self._tokenizer.decode([token])).encode()
