"""Draws the diagrams of docs/concepts.md: boxes, arrows between them, and words on the arrows.

python -m lab.concept_pictures
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from speculation.colours import colour_of

PLOTS = Path(__file__).parents[1] / "docs" / "plots"
_LINE, _LETTER, _ROOM = 18, 7.3, 12
# Opaque, so that it can be read on a page of either kind, whichever the reader's system prefers.
_STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1f2328;text-anchor:middle}.said{font-size:12.5px;fill:#57606a}"
    ".ground{fill:#fff}.box{fill:#f6f8fa;stroke:#8c959f;stroke-width:1.3}.arrow{fill:none;stroke:#57606a;stroke-width:1.4}"
    ".head{fill:#57606a}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.said{fill:#9ea7b3}.ground{fill:#0d1117}"
    ".box{fill:#161b22}.arrow{stroke:#9ea7b3}.head{fill:#9ea7b3}}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box around its middle; ``\\n`` begins a new line of its text.

    Attributes:
        source: colours the border; empty: grey.
        asks: it is a question, drawn with pointed sides.
    """

    name: str
    text: str
    x: float
    y: float
    source: str = ""
    asks: bool = False
    width: float = 0

    @property
    def half(self) -> tuple[float, float]:
        """Half of its width and of its height."""
        lines = self.text.split("\n")
        wide = self.width or max(map(len, lines)) * _LETTER + 2 * _ROOM + (24 if self.asks else 0)
        return wide / 2, (len(lines) * _LINE + 14) / 2

    def edge(self, x: float, y: float) -> tuple[float, float]:
        """The point of its border that lies towards another point."""
        wide, high = self.half
        dx, dy = x - self.x, y - self.y
        share = min(wide / abs(dx) if dx else math.inf, high / abs(dy) if dy else math.inf)
        return self.x + dx * share, self.y + dy * share


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """From one box to another. ``bend``: how far its middle lies beside the straight line, to its left if positive."""

    start: str
    end: str
    says: str = ""
    bend: float = 0
    both: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A diagram; ``about`` is read out where it is not seen. ``words``: (x, y, text) of titles."""

    about: str
    width: int
    height: int
    boxes: Sequence[Box]
    arrows: Sequence[Arrow] = ()
    words: Sequence[tuple[float, float, str]] = ()


LAW = Picture(
    about="Drafters guess a tree; the target makes its own choice after every guess. Guesses that agree are kept.",
    width=1000,
    height=240,
    boxes=(
        Box(name="text", text="text so far", x=70, y=140),
        Box(name="drafters", text="drafters", x=215, y=45),
        Box(name="target", text="target", x=330, y=140),
        Box(name="walk", text="guess = choice?", x=650, y=140, asks=True),
        Box(name="keep", text="keep it, go on\nbelow it", x=885, y=55),
        Box(name="own", text="keep the target's token,\nend the pass", x=885, y=205),
    ),
    arrows=(
        Arrow(start="text", end="drafters"),
        Arrow(start="text", end="target"),
        Arrow(start="drafters", end="target", says="a tree of guesses"),
        Arrow(start="target", end="walk", says="its own choice\nafter every guess"),
        Arrow(start="walk", end="keep", says="yes", bend=14),
        Arrow(start="keep", end="walk", bend=14),
        Arrow(start="walk", end="own", says="no"),
    ),
)
TREE = Picture(
    about="A tree of guesses: self and other come after the text, a dot after self, x and y after the dot.",
    width=760,
    height=150,
    boxes=(
        Box(name="root", text="text", x=50, y=75),
        Box(name="a", text="self 0.8\nsuffix", x=220, y=45, source="suffix"),
        Box(name="b", text="other 0.1\nrecycling", x=220, y=112, source="recycling"),
        Box(name="c", text=". 0.7\nsuffix", x=420, y=45, source="suffix"),
        Box(name="d", text="x 0.4\nsuffix", x=620, y=35, source="suffix"),
        Box(name="e", text="y 0.3\nrecycling", x=620, y=112, source="recycling"),
    ),
    arrows=(
        Arrow(start="root", end="a"),
        Arrow(start="root", end="b"),
        Arrow(start="a", end="c"),
        Arrow(start="c", end="d"),
        Arrow(start="c", end="e"),
    ),
)
CACHE = Picture(
    about="A cache: after a pass guesses 1, 2 and 3 lie behind the context; the rows of 1 and 3 are moved next to it.",
    width=800,
    height=200,
    words=((90, 30, "after a pass"), (90, 130, "before the next one")),
    boxes=(
        Box(name="c1", text="context", x=140, y=60, width=250),
        Box(name="p1", text="pending token", x=335, y=60, width=128),
        Box(name="t1", text="guess 1 ✓", x=455, y=60, width=100, source="suffix"),
        Box(name="t2", text="guess 2", x=560, y=60, width=100),
        Box(name="t3", text="guess 3 ✓", x=665, y=60, width=100, source="suffix"),
        Box(name="c2", text="context", x=140, y=160, width=250),
        Box(name="p2", text="pending token", x=335, y=160, width=128),
        Box(name="u1", text="guess 1", x=455, y=160, width=100, source="suffix"),
        Box(name="u3", text="guess 3", x=560, y=160, width=100, source="suffix"),
    ),
    arrows=(Arrow(start="t1", end="u1"), Arrow(start="t3", end="u3")),
)
WHO = Picture(
    about="A client speaks with the router, the router with a verifier, the verifier with drafters, these with retrieval.",
    width=1000,
    height=90,
    boxes=(
        Box(name="client", text="client", x=50, y=45),
        Box(name="router", text="router", x=245, y=45),
        Box(name="verifier", text="verifier\n(target, decoding loop)", x=525, y=45),
        Box(name="drafter", text="drafter", x=785, y=45),
        Box(name="retrieval", text="retrieval", x=945, y=45),
    ),
    arrows=(
        Arrow(start="client", end="router", says="gRPC or HTTP"),
        Arrow(start="router", end="verifier", says="token ids, plan"),
        Arrow(start="verifier", end="drafter", says="steps, trees", both=True),
        Arrow(start="drafter", end="retrieval", says="look-ups", both=True),
    ),
)
PICTURES = {"law": LAW, "tree": TREE, "cache": CACHE, "who": WHO}


def main() -> None:
    for name, picture in PICTURES.items():
        (PLOTS / f"{name}.svg").write_text(drawn(picture))


def drawn(picture: Picture) -> str:
    """The picture, an SVG."""
    boxes = {box.name: box for box in picture.boxes}
    parts = [f'<rect class="ground" width="{picture.width}" height="{picture.height}" rx="8"/>']
    for arrow in picture.arrows:
        parts += _arrow(arrow, boxes[arrow.start], boxes[arrow.end])
    for box in picture.boxes:
        parts += _box(box)
    parts += [_text(x, y, text, "said") for x, y, text in picture.words]
    size = f'viewBox="0 0 {picture.width} {picture.height}" width="{picture.width}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(picture.about)}">'
    return f"{head}\n<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"


def _box(box: Box) -> list[str]:
    wide, high = box.half
    colour = f' style="stroke:{colour_of(box.source)}"' if box.source else ""
    left, right, top, bottom = box.x - wide, box.x + wide, box.y - high, box.y + high
    shape = f'<rect class="box" x="{left:g}" y="{top:g}" width="{2 * wide:g}" height="{2 * high:g}" rx="6"{colour}/>'
    if box.asks:
        inner = f"{left + 12:g},{top:g} {right - 12:g},{top:g} {right:g},{box.y:g}"
        shape = (
            f'<polygon class="box" points="{inner} {right - 12:g},{bottom:g} {left + 12:g},{bottom:g} {left:g},{box.y:g}"/>'
        )
    lines = box.text.split("\n")
    first = box.y - (len(lines) - 1) * _LINE / 2 + 5
    return [shape, *(_text(box.x, first + at * _LINE, line) for at, line in enumerate(lines))]


def _arrow(arrow: Arrow, start: Box, end: Box) -> list[str]:
    length = math.hypot(end.x - start.x, end.y - start.y)
    aside = (end.y - start.y) / length * arrow.bend, -(end.x - start.x) / length * arrow.bend
    # The curve passes through the middle; its control point lies twice as far.
    middle = (start.x + end.x) / 2 + 2 * aside[0], (start.y + end.y) / 2 + 2 * aside[1]
    a, b = start.edge(*middle), end.edge(*middle)
    parts = [
        f'<path class="arrow" d="M{a[0]:.1f},{a[1]:.1f}Q{middle[0]:.1f},{middle[1]:.1f} {b[0]:.1f},{b[1]:.1f}"/>',
        _head(middle, b),
    ]
    if arrow.both:
        parts.append(_head(middle, a))
    if arrow.says:
        lines = arrow.says.split("\n")
        x, y = (a[0] + b[0]) / 2 + aside[0], (a[1] + b[1]) / 2 + aside[1]
        across, down = abs(b[0] - a[0]), abs(b[1] - a[1])
        # Beside a steep arrow, above one that is not; a second line goes below it.
        x += max(map(len, lines)) * 3.4 + 10 if down > across / 2 else 0
        y -= 12 if down > across / 10 else 0
        parts += [_text(x, y - 6 + at * 22, line, "said") for at, line in enumerate(lines)]
    return parts


def _head(origin: tuple[float, float], tip: tuple[float, float]) -> str:
    angle = math.atan2(tip[1] - origin[1], tip[0] - origin[0])
    corners = [tip, *((tip[0] - 9 * math.cos(angle + turn), tip[1] - 9 * math.sin(angle + turn)) for turn in (0.42, -0.42))]
    return '<polygon class="head" points="' + " ".join(f"{x:.1f},{y:.1f}" for x, y in corners) + '"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{named}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
