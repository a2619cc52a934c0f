"""Reads whole numbers from what users and operators type."""

from __future__ import annotations


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that a text of plain digits spells; None: it is none from ``least`` to ``most``."""
    # Python refuses to read thousands of digits.
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(most)):
        return None
    return number if least <= (number := int(text)) <= most else None
