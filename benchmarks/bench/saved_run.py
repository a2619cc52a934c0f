"""An answer in the form in which the page at ``/`` saves and opens one: its tokens, who guessed them, and its passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

# As in services/api/http/page.html, which refuses others.
FORMAT, VERSION = "outrider-run", 1


class _Origin(Protocol):
    @property
    def source(self) -> str: ...
    @property
    def text_length(self) -> int: ...


class _Timing(Protocol):
    @property
    def queue_s(self) -> float: ...
    @property
    def time_to_first_token_s(self) -> float: ...
    @property
    def total_s(self) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedAnswer:
    """An answer that was asked for with ``report: trees``, from the router or from the Python client.

    Attributes:
        origins: one for each token.
        passes: as in ``choices[].speculation`` of OpenAI's API.
        decoding: as in ``metrics.speculative_decoding`` there.
    """

    model: str
    text: str
    token_ids: Sequence[int]
    origins: Sequence[_Origin]
    passes: Sequence[Mapping[str, Any]]
    decoding: Mapping[str, Any]
    timing: _Timing
    seed: int
    finish: str


def as_saved(answer: RecordedAnswer, strategy: str) -> dict[str, Any]:
    """The answer as a JSON object, without the messages that it answers."""
    timing = answer.timing
    times = {name: getattr(timing, name) for name in ("queue_s", "time_to_first_token_s", "total_s")}
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": answer.model,
        "strategy": strategy,
        "messages": [],
        "text": answer.text,
        # A number of JavaScript does not hold 64 bits.
        "seed": str(answer.seed),
        "finish": answer.finish,
        "tokens": _tokens(answer),
        "passes": list(answer.passes),
        "metrics": {"speculative_decoding": dict(answer.decoding), **times},
        "seconds": timing.total_s,
        "completion": len(answer.token_ids),
    }


def _tokens(answer: RecordedAnswer) -> list[dict[str, Any]]:
    told, at = [], 0
    for number, (token, origin) in enumerate(zip(answer.token_ids, answer.origins, strict=True), 1):
        # An incomplete character at the very end belongs to the last token.
        end = at + origin.text_length if number < len(answer.token_ids) else len(answer.text)
        told.append({"id": token, "text": answer.text[at:end], "source": origin.source})
        at = end
    return told
