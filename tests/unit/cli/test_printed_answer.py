"""The line below an answer on the command line says what drafting saved or cost, where that is worth a word."""

from __future__ import annotations

import pytest

from cli.printed_answer import as_object, summary
from outrider.types import Generation, SpeculativeDecoding, Timing, Usage


def answer(seconds_saved: float, total_s: float = 2.0) -> Generation:
    return Generation(
        text="so it goes",
        token_ids=(5, 6, 7),
        logprobs=(),
        finish_reason="length",
        stop=None,
        usage=Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=0),
        speculative_decoding=SpeculativeDecoding(
            strategy="blend",
            mean_acceptance_length=1.5,
            draft_acceptance_rate=0.5,
            num_spec_steps=2,
            num_draft_tokens=2,
            num_accepted_draft_tokens=1,
            acceptance_histogram=(1, 1),
            seconds_saved=seconds_saved,
        ),
        timing=Timing(queue_s=0.0, time_to_first_token_s=0.1, total_s=total_s, tokens_per_second=3 / total_s),
        prompt_token_ids=(1, 2),
        seed=0,
        model="tiny",
        request_id="r",
    )


@pytest.mark.parametrize(
    ("seconds", "total_s", "said"),
    [
        (0.81, 2.0, ", saved 0.8 s"),
        (-0.12, 2.0, ", cost 0.1 s"),
        (0.0, 2.0, ""),
        # Too little to be seen, and too small a share of a long answer.
        (0.04, 0.1, ""),
        (-0.04, 0.1, ""),
        (0.5, 60.0, ""),
        (2.5, 60.0, ", saved 2.5 s"),
    ],
)
def test_the_last_line(seconds: float, total_s: float, said: str) -> None:
    assert summary(answer(seconds, total_s)) == f"3 tokens, {3 / total_s:.1f} tok/s, blend: 1.50 tokens per pass{said}"


def test_the_json_object_has_the_figure_as_it_is() -> None:
    assert as_object(answer(-0.0123))["metrics"]["speculative_decoding"]["seconds_saved"] == -0.0123
