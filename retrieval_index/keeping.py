"""Which documents are kept: those of low perplexity, by a share of the documents, of the tokens, or of each class of length.

A document's mean perplexity depends on its length, so that a share of all documents may hold far more of the short ones than
of the text. The other ways keep as much text as is asked for, or as many documents of each length.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from speculation.errors import ConfigurationError

KeepBy = Literal["documents", "tokens", "length"]
WAYS: tuple[str, ...] = get_args(KeepBy)


def kept_documents(perplexities: Sequence[float], lengths: Sequence[int], keep: float, by: KeepBy) -> list[bool]:
    """For each document whether it is kept. Documents of equal perplexity are kept or dropped together.

    Args:
        lengths: tokens of each document.
        keep: the share to keep, above 0 and at most 1.
        by: ``documents``: that share of them; ``tokens``: documents until they have that share of all tokens; ``length``:
            that share of the documents of each class of length, from one power of two to the next.
    """
    if by == "tokens":
        limit = _limit_of_tokens(perplexities, lengths, keep)
        return [perplexity <= limit for perplexity in perplexities]
    classes = [length.bit_length() if by == "length" else 0 for length in lengths]
    limits = {
        each: limit_for([value for value, own in zip(perplexities, classes, strict=True) if own == each], keep)
        for each in set(classes)
    }
    return [value <= limits[own] for value, own in zip(perplexities, classes, strict=True)]


def limit_for(perplexities: Sequence[float], keep: float) -> float:
    """The highest perplexity within the share ``keep`` of the documents, lowest perplexities first."""
    ordered = sorted(perplexities)
    return ordered[max(0, math.ceil(keep * len(ordered)) - 1)]


def _limit_of_tokens(perplexities: Sequence[float], lengths: Sequence[int], keep: float) -> float:
    """The perplexity up to which documents have the share ``keep`` of all tokens."""
    wanted, so_far = keep * sum(lengths), 0
    for perplexity, length in sorted(zip(perplexities, lengths, strict=True)):
        so_far += length
        if so_far >= wanted:
            return perplexity
    return math.inf


def check_can_draw() -> None:
    """Check for matplotlib before hours of scoring, not after them.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("the histogram needs matplotlib: pip install 'outrider-server[bench]'")


def draw_histogram(perplexities: Sequence[float], limit: float, path: Path) -> None:
    """Write the histogram of perplexities, with the limit of what is kept, as a PNG file."""
    from matplotlib.figure import Figure

    finite = [value for value in perplexities if math.isfinite(value)]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    low, high = min(finite, default=1.0), max(finite, default=10.0)
    steps = 40
    edges = [low * (max(high / low, 1.01)) ** (step / steps) for step in range(steps + 1)]
    axes.hist(finite, bins=edges, color="#4c72b0")
    axes.axvline(limit, color="#c44e52", label=f"kept: perplexity up to {limit:.1f}")
    axes.set_xscale("log")
    axes.set_xlabel("perplexity under the target")
    axes.set_ylabel("documents")
    axes.set_title(f"{len(perplexities):,} documents")
    axes.legend()
    figure.savefig(path, dpi=120)
