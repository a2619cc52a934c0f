"""The context of a request: its tenant and the kind of its prompt, by which the router chooses how it is drafted.

A context is a name, and says nothing that a text could be read from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from services.router.rules.facts import Facts

# Where classes of prompts begin: their tokens, and the share of their n-grams that occurred before.
_LENGTHS = (128, 512, 2048)
_REPEATED = (0.1, 0.3, 0.6)
# Tokens of an n-gram, and how many tokens at the prompt's end are looked at.
_NGRAM, _LOOKED_AT = 4, 8192
# What any prompt's kind is a kind of.
ANY = "any"


@dataclass(frozen=True, slots=True)
class Context:
    """A request's tenant (empty: the server asks for none), and the kind of its prompt, such as ``128.2.greedy``."""

    tenant: str
    kind: str


def context_of(prompt: Sequence[int], facts: Facts) -> Context:
    """The context of a request, in time that grows with the prompt at most linearly.

    Args:
        prompt: its token ids.
    """
    length = ("0", *map(str, _LENGTHS))[bisect_right(_LENGTHS, len(prompt))]
    repeated = bisect_right(_REPEATED, share_repeated(prompt))
    tools = ".tools" if facts.tools else ""
    return Context(facts.tenant, f"{length}.{repeated}.{'sampled' if facts.sampled else 'greedy'}{tools}")


def share_repeated(prompt: Sequence[int]) -> float:
    """The share of a prompt's n-grams, in its last ``_LOOKED_AT`` tokens, that occurred there before.

    >>> share_repeated((1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4))
    0.125
    """
    recent = prompt[-_LOOKED_AT:]
    grams = len(recent) - _NGRAM + 1
    if grams < 1:
        return 0.0
    distinct = set(zip(*(islice(recent, first, None) for first in range(_NGRAM)), strict=False))
    return 1 - len(distinct) / grams
