"""Sampling parameters refuse what they cannot honour, by name."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from speculation import limits
from speculation.errors import InvalidArgument
from speculation.types import Features, SamplingParams, SpeculationStats, StructuredOutputs

BAD: list[tuple[str, object]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 101.0),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("seed", -1),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("min_tokens", 257),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.nan),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 3.0),
    ("stop", ("x",) * 17),
    ("stop", ("",)),
    ("stop", ("x" * 257,)),
    ("stop_token_ids", tuple(range(65))),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("logprobs", 21),
    ("logprobs", -1),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: str(value)[:20])
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert caught.value.allowed


# At both ends of every range.
GOOD: list[tuple[str, object]] = [
    ("temperature", 0.0), ("temperature", 0.001), ("temperature", 100.0), ("top_k", 0), ("top_k", 2**32 - 1), ("top_p", 1e-9),
    ("top_p", 1.0), ("min_p", 0.0), ("min_p", 1.0), ("seed", 0), ("seed", 2**64 - 1), ("max_tokens", 1), ("max_tokens", 2**31 - 1),
    ("min_tokens", 256), ("repetition_penalty", 0.01), ("repetition_penalty", 10.0), ("presence_penalty", -2.0),
    ("presence_penalty", 2.0), ("frequency_penalty", -2.0), ("frequency_penalty", 2.0), ("stop", ("x",) * 16),
    ("stop", ("x" * 256,)), ("stop_token_ids", tuple(range(64))), ("logit_bias", {1: -100.0, 2: 100.0}),
    ("logit_bias", dict.fromkeys(range(1024), 1.0)), ("logprobs", 0), ("logprobs", 20),
]  # fmt: skip


def test_values_at_a_bound_are_taken() -> None:
    for field, value in GOOD:
        assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]


def test_a_grammar_may_be_as_long_as_it_may() -> None:
    most = limits.MAX_GRAMMAR_CHARACTERS
    assert len(StructuredOutputs(kind="regex", text="a" * most).text) == most
    with pytest.raises(InvalidArgument) as caught:
        StructuredOutputs(kind="regex", text="a" * (most + 1))
    assert caught.value.field == "structured_outputs.regex"


def test_parts_of_hidden_states_are_their_bytes() -> None:
    states = Features(data=bytes(range(12)), rows=2, width=3, dtype="float16", start=4, layers=(1, 5, -1))
    some = states.of_layers((-1, 1))
    assert (some.data, some.width, some.layers, some.rows) == (bytes([4, 5, 0, 1, 10, 11, 6, 7]), 2, (-1, 1), 2)
    assert states.of_layers((1, 5, -1)) is states
    whole = replace(states, data=states.data[:6], rows=1).followed_by(
        [replace(states, data=states.data[6:], rows=1, start=5)]
    )
    assert whole == states and states.followed_by([]) is states


def test_statistics_follow_vllms_definitions() -> None:
    stats = SpeculationStats(num_spec_tokens=4)
    stats.record(drafted=4, accepted_sources=("a", "a", "b"), committed=4, seconds_saved=0.5)
    stats.record(drafted=4, accepted_sources=(), committed=1, seconds_saved=-0.75)
    stats.record(drafted=0, accepted_sources=(), committed=1)
    assert stats.mean_acceptance_length == 2
    assert stats.draft_acceptance_rate == 3 / 8
    assert stats.acceptance_histogram == [2, 0, 0, 1, 0]
    assert stats.acceptance_histogram_by_draft_length == {4: [1, 0, 0, 1, 0]}
    assert stats.accepted_by_source == {"a": 2, "b": 1}
    assert stats.seconds_saved == -0.25


def test_the_shared_types_need_the_standard_library_only() -> None:
    script = (
        "import sys, speculation.types, speculation.messages; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
