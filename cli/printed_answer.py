"""What ``outrider generate`` and ``chat`` print: the text as it comes and a line about it, or a JSON object."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from cli.coloured_text import SourcedText, legend, print_pieces
from cluster.process.terminal import stderr
from speculation.errors import OutriderError

if TYPE_CHECKING:
    import outrider

# What is less than so many seconds, or than this share of the time of an answer, differs from one answer to the next anyway.
_WORTH_S, _WORTH_SHARE = 0.05, 0.03


def print_answer(stream: outrider.Stream, as_json: bool, *, sources: bool = False) -> None:
    """Print an answer to stdout, and a line about it to stderr.

    Args:
        sources: show who guessed its tokens, which the stream tells: by colours on a terminal, and in numbers on stderr.

    Raises:
        OutriderError: the stream ends without a result.
    """
    coloured = SourcedText() if sources else None
    with stream:
        for chunk in stream:
            if as_json:
                continue
            if coloured is None:
                sys.stdout.write(chunk.text)
            else:
                print_pieces(coloured.push(chunk))
            sys.stdout.flush()
    if stream.result is None:
        raise OutriderError("the server ended the stream without a result")
    if as_json:
        typer.echo(json.dumps(as_object(stream.result), ensure_ascii=False))
        return
    sys.stdout.write("\n")
    stderr().print(f"[dim]{summary(stream.result)}[/dim]")
    if coloured is not None:
        stderr().print(legend(coloured.tokens))


def summary(result: outrider.Generation) -> str:
    """An answer's figures in one line, without what drafting saved or cost where that is too little to tell."""
    speculative, timing = result.speculative_decoding, result.timing
    said = (
        f"{result.usage.completion_tokens} tokens, {timing.tokens_per_second:.1f} tok/s, "
        f"{speculative.strategy}: {speculative.mean_acceptance_length:.2f} tokens per pass"
    )
    seconds = speculative.seconds_saved
    if abs(seconds) < max(_WORTH_S, _WORTH_SHARE * timing.total_s):
        return said
    return f"{said}, {'saved' if seconds > 0 else 'cost'} {abs(seconds):.1f} s"


def as_object(result: outrider.Generation) -> dict[str, Any]:
    """The JSON object that --json prints; ``origins`` where they were asked for."""
    told: dict[str, Any] = {
        "text": result.text,
        "prompt_token_ids": list(result.prompt_token_ids),
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "usage": dataclasses.asdict(result.usage),
        "metrics": {"speculative_decoding": dataclasses.asdict(result.speculative_decoding)},
        "timing": dataclasses.asdict(result.timing),
        "seed": result.seed,
        "model": result.model,
    }
    if result.origins:
        told["origins"] = [dataclasses.asdict(origin) for origin in result.origins]
    return told
