"""Draws the README's picture: one answer as passes of plain decoding, and as passes of the blend.

python -m lab.passes_picture --record   # asks a service in this process, and keeps both answers in passes.json
python -m lab.passes_picture            # draws passes.svg from that file
"""

from __future__ import annotations

import argparse
import json
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import outrider
from cli.demo.measuring import EDIT
from cli.demo.recording import PLAIN, Recording, record
from cluster.service import serving
from cluster.settings.config import load
from speculation.colours import colour_of
from speculation.sources import TARGET

PLOTS = Path(__file__).parents[1] / "docs" / "plots"
RECORDED, DRAWN = PLOTS / "passes.json", PLOTS / "passes.svg"
STRATEGY, MOST = "blend", 160
_WIDTH, _LEFT, _HEIGHT = 1000, 8, 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        RECORDED.write_text(json.dumps(recorded(), ensure_ascii=False, indent=0) + "\n")
    DRAWN.write_text(drawn(json.loads(RECORDED.read_text())))


def recorded() -> dict[str, Any]:
    """Both answers, pass by pass.

    Raises:
        ValueError: they differ.
    """
    settings = load(flags=["server.port=0", "server.http_port=null", "server.ops_port=null"])
    with serving(settings, in_process=True, verbose=False) as addresses, outrider.Client(addresses.grpc) as client:
        plain, ours = (record(client, strategy, EDIT, MOST) for strategy in (PLAIN, STRATEGY))
    if plain.result.token_ids != ours.result.token_ids:
        raise ValueError("the answers differ")
    answers = {"plain": _passes(plain), "ours": _passes(ours)}
    return {"model": settings.model, "prompt": EDIT, "strategy": STRATEGY, "text": ours.result.text, **answers}


def _passes(answer: Recording) -> list[list[str]]:
    """For each pass, who guessed each of the tokens that it brought."""
    ends = [0, *(tokens for _, tokens in answer.arrivals)]
    sources = [origin.source for origin in answer.result.origins]
    return [sources[start:end] for start, end in pairwise(ends)]


def drawn(answers: dict[str, Any]) -> str:
    """The picture, an SVG."""
    plain, ours = answers["plain"], answers["ours"]
    tokens = sum(map(len, plain))
    step = (_WIDTH - 2 * _LEFT) / tokens
    parts = [
        _label(24, f"plain decoding: {len(plain)} passes, one token each"),
        *_strip(plain, 34, step),
        _label(92, f"Outrider ({answers['strategy']}): {len(ours)} passes, the same {tokens} tokens"),
        *_strip(ours, 102, step),
    ]
    at = float(_LEFT)
    sources = [source for each in ours for source in each]
    for source in sorted(set(sources), key=lambda each: (each == TARGET, -sources.count(each))):
        name = "by nobody: the target's own" if source == TARGET else f"by {source}"
        text = f"{sources.count(source)} guessed {name}" if source != TARGET else f"{sources.count(source)} {name}"
        parts.append(f'<rect x="{at:g}" y="142" width="12" height="12" rx="2" fill="{colour_of(source)}"/>')
        parts.append(f'<text x="{at + 18:g}" y="152" class="small">{escape(text)}</text>')
        at += 40 + 6.6 * len(text)
    about = f"The same answer twice. Plain decoding takes {len(plain)} passes, Outrider {len(ours)}."
    style = (
        "text{font:15px system-ui,sans-serif;fill:#1f2328}.small{font-size:13px}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} 164" role="img" aria-label="{escape(about)}">\n'
        f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _label(y: int, text: str) -> str:
    return f'<text x="{_LEFT}" y="{y}">{escape(text)}</text>'


def _strip(passes: list[list[str]], y: int, step: float) -> list[str]:
    """One box for each token; those of a pass touch."""
    boxes, at = [], 0
    gap = min(2.0, step / 4)
    for each in passes:
        for place, source in enumerate(each):
            last = place == len(each) - 1
            width = step - (gap if last else 0)
            x = _LEFT + (at + place) * step
            boxes.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_HEIGHT}" fill="{colour_of(source)}"/>')
        at += len(each)
    return boxes


if __name__ == "__main__":
    main()
