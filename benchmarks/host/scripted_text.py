"""Texts that a target without arithmetic "says": phrases that come again with changes, so that drafters find something."""

from __future__ import annotations

import random
from collections.abc import Sequence

# A phrase comes again with one token in so many changed.
_PHRASE, _CHANGED = 48, 10
_PHRASES = 6
VOCAB_SIZE = 128_256
# Ids of texts are below it; those above are likely after them.
_LARGEST = VOCAB_SIZE - 64


def scripted_text(seed: int, length: int) -> list[int]:
    """``length`` token ids, without 0, the end of text."""
    draw = random.Random(seed)
    phrases = [[draw.randrange(1, _LARGEST) for _ in range(_PHRASE)] for _ in range(_PHRASES)]
    text: list[int] = []
    while len(text) < length:
        phrase = draw.choice(phrases)
        text += [draw.randrange(1, _LARGEST) if draw.randrange(_CHANGED) == 0 else token for token in phrase]
    return text[:length]


def likely_after(token: int, count: int) -> tuple[int, ...]:
    """``count`` ids, ``token`` first: what a target that chooses ``token`` might also find likely."""
    return tuple(range(token, token + count))


def choices_of(text: Sequence[int], context: int, chain: int, parents: Sequence[int]) -> list[int]:
    """The text's token after the last row of a chain, and after every node, as far down as its depth says."""
    at = context + chain
    depth = [0] * (len(parents) + 1)
    for node, parent in enumerate(parents, 1):
        depth[node] = depth[parent + 1] + 1
    return [text[at + each] for each in depth]
