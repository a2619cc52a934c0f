"""Shows an answer written twice, side by side, at the speed at which each was measured."""

from __future__ import annotations

import time
from collections import Counter

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from cli.coloured_text import legend
from cli.demo.recording import Recording
from speculation.colours import colour_of
from speculation.sources import TARGET

_FRAMES_PER_S = 20
# Seconds for which the last frame is looked at.
_LAST_S = 0.5


def show(console: Console, plain: Recording, ours: Recording) -> None:
    """Write both; a terminal sees them grow, a file the end alone."""
    end = max(plain.seconds, ours.seconds)
    if console.is_terminal:
        began = time.perf_counter()
        with Live(console=console, refresh_per_second=_FRAMES_PER_S, transient=True) as live:
            while (now := time.perf_counter() - began) < end + _LAST_S:
                live.update(_frame(console, plain, ours, now))
                time.sleep(1 / _FRAMES_PER_S)
    console.print(_frame(console, plain, ours, end))
    console.print(legend(Counter(origin.source for origin in ours.result.origins)))


def _frame(console: Console, plain: Recording, ours: Recording, now: float) -> Group:
    # Two panels and the space between them.
    width = (console.width - 1) // 2
    left = _panel("plain decoding", plain, now, width, coloured=False)
    right = _panel("Outrider", ours, now, width, coloured=True)
    return Group(Columns([left, right], padding=(0, 1)))


def _panel(name: str, recording: Recording, now: float, width: int, *, coloured: bool) -> Panel:
    tokens, passes = recording.at(now)
    text = Text()
    for piece, source in recording.spans(tokens):
        text.append(piece, f"bold {colour_of(source)}" if coloured and source != TARGET else "")
    # As high as the whole answer, so that nothing moves.
    lines = 1 + recording.result.text.count("\n")
    said = f"{passes} passes | {min(now, recording.seconds):.2f} s"
    return Panel(text, title=name, subtitle=said, width=width, height=lines + 2, border_style="dim")
