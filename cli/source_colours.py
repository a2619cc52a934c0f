"""How the terminal shows who guessed a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.text import Text

TARGET = "target"
_COLOURS = {
    "suffix": "#2f81f7",
    "recycling": "#a371f7",
    "fspad": "#3fb950",
    "prompt_lookup": "#d29922",
    "grammar": "#f778ba",
}
_OTHER = "#db6d28"


def style_of(source: str) -> str:
    return "dim" if source == TARGET else f"bold {_COLOURS.get(source, _OTHER)}"


def legend(sources: Iterable[str]) -> Text:
    """The sources with their colours and how many tokens each of them guessed."""
    counts = Counter(sources)
    text = Text()
    for source, count in counts.most_common():
        text.append(f"{'the target itself' if source == TARGET else source} {count}  ", style_of(source))
    return text
