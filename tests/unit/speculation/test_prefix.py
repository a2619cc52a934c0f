"""The hash by which a draft names its prefix: each token and its place count, and peers of other versions have the same."""

from __future__ import annotations

import random

from speculation.prefix import EMPTY_HASH, extend_hash


def test_its_numbers_stay() -> None:
    known = {(): 0xCBF29CE484222325, (0,): 0xAF63BC49FD1C5448, (1, 2): 0x22BF2CB802FBC90E, (2, 1): 0x22C84BB801575254}
    assert {tokens: extend_hash(EMPTY_HASH, tokens) for tokens in known} == known


def test_a_prefix_goes_on_from_its_own_hash() -> None:
    text = random.Random(1).choices(range(2**31), k=50)
    whole = extend_hash(EMPTY_HASH, text)
    assert all(extend_hash(extend_hash(EMPTY_HASH, text[:at]), text[at:]) == whole for at in range(51))


def test_other_tokens_have_another_hash() -> None:
    pairs = [(one, other) for one in range(300) for other in range(300)]
    found = {extend_hash(EMPTY_HASH, each) for each in (*pairs, (), *((one,) for one in range(300)))}
    assert len(found) == len(pairs) + 1 + 300 and max(found) < 2**64
