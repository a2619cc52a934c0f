"""GPT-2's letters for bytes, in which vocabularies of tokenisers on bytes are written."""

from __future__ import annotations

from functools import cache


@cache
def byte_of_letter() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for letters from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
