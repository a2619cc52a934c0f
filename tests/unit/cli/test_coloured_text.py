"""Text in the colours of those who guessed it: which piece is whose, and colours that can be read."""

from __future__ import annotations

import random

import pytest

from cli.coloured_text import SourcedText, legend, print_pieces
from outrider.types import Chunk, TokenOrigin
from speculation.colours import COLOURS, colour_of
from speculation.sources import GRAMMAR, SOURCES, STRATEGIES, TARGET


def chunk(text: str, *origins: tuple[str, int]) -> Chunk:
    told = tuple(TokenOrigin(source=source, text_length=length) for source, length in origins)
    return Chunk(text=text, token_ids=tuple(range(len(origins))), origins=told)


def test_pieces_are_the_text_however_late_it_comes() -> None:
    source = random.Random(4)
    for _ in range(200):
        tokens = [(source.choice(["suffix", "recycling", TARGET]), source.randrange(4)) for _ in range(20)]
        whole = "".join(name[0] * length for name, length in tokens)
        made, found, shown, known = SourcedText(), [], 0, 0
        while tokens or shown < len(whole):
            some, tokens = tokens[:3], tokens[3:]
            known += sum(length for _, length in some)
            until = source.randint(shown, known) if tokens else known
            found += made.push(chunk(whole[shown:until], *some))
            shown = until
        assert "".join(text for _, text in found) == whole
        assert all(set(text) == {name[0]} for name, text in found)
        assert made.tokens.total() == 20


def test_what_no_token_counts_is_the_last_ones() -> None:
    made = SourcedText()
    assert made.push(chunk("ab", ("suffix", 1), ("recycling", 2))) == [("suffix", "a"), ("recycling", "b")]
    # The character that was incomplete at the end.
    assert made.push(chunk("c\ufffd")) == [("recycling", "c"), ("recycling", "\ufffd")]


def test_a_legend_names_the_most_useful_first() -> None:
    made = SourcedText()
    made.push(chunk("abcd", ("suffix", 1), ("recycling", 1), ("recycling", 1), (TARGET, 1)))
    assert legend(made.tokens).plain == "guessed by: recycling 2, suffix 1, target 1 (target: guessed by nobody)"


def test_a_pipe_gets_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_pieces([("suffix", "a\t[b]"), (TARGET, "\n")])
    assert capsys.readouterr().out == "a\t[b]\n"


def test_a_terminal_gets_colours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("COLORTERM", "truecolor"), ("TERM", "xterm"), ("COLUMNS", "10")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_pieces([("suffix", "[b]longer than a line"), (TARGET, "x")])
    assert capsys.readouterr().out == "\x1b[38;2;5;154;70m[b]longer than a line\x1b[0m\x1b[38;2;128;128;128mx\x1b[0m"


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_source_has_a_colour_that_can_be_read_on_white_and_on_black() -> None:
    assert COLOURS.keys() == {TARGET, GRAMMAR, *SOURCES} - {"autoregressive"}
    assert len(set(COLOURS.values())) == len(COLOURS)
    for name in (*COLOURS, *STRATEGIES, "unheard of"):
        light = luminance(colour_of(name))
        assert 1.05 / (light + 0.05) >= 3.6 and (light + 0.05) / 0.05 >= 3.6, name
