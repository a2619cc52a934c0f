"""Hidden states in messages: what breaks a limit is refused, and what is too long for one message comes in several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.links.codec import drafting, features
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.messages import FeatureChunk
from speculation.types import Features, Observation
from tests.running.refusals import refuses
from tests.unit.links.test_codec import STEP, TREE

FEATURES = Features(data=bytes(24), rows=2, width=6, dtype="bfloat16", start=5, layers=(3, 9, -1))
TOO_LONG = limits.MAX_FEATURE_BYTES // 8 + 1


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"dtype": "int8"}, "features.dtype"),
        ({"dtype": ""}, "features.dtype"),
        ({"rows": 0, "data": b""}, "features"),
        ({"width": 0, "data": b""}, "features"),
        ({"rows": 3}, "features.data"),
        ({"data": bytes(23)}, "features.data"),
        ({"dtype": "float32"}, "features.data"),
        ({"width": 7, "data": bytes(28)}, "features.width"),
        ({"width": limits.MAX_FEATURE_WIDTH + 2, "layers": (1, 2)}, "features.width"),
        ({"layers": tuple(range(17)), "width": 17}, "features.layers"),
        ({"start": limits.MAX_SESSION_TOKENS - 1}, "features.rows"),
        ({"rows": 2**32 - 1, "start": 2**32 - 1}, "features.rows"),
        ({"data": bytes(8 * TOO_LONG), "rows": TOO_LONG, "width": 4, "layers": (1, 2)}, "features.data"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hidden_states_that_break_a_limit_are_refused(wrong: dict[str, Any], field: str) -> None:
    chunk = FeatureChunk(session_id="s", features=replace(FEATURES, **wrong))
    wire = drafting.encode_drafting_call(chunk)
    with pytest.raises(InvalidArgument) as caught:
        drafting.decode_drafting_call(wire)
    assert caught.value.field == field
    # Within one process the numbers travel apart: nothing is checked less, but for the size of a message.
    bare, data = features.detach_data(chunk)
    assert data == chunk.features.data
    decode = lambda: drafting.decode_drafting_call(drafting.encode_drafting_call(bare), data)  # noqa: E731
    if len(chunk.features.data) > limits.MAX_FEATURE_BYTES:
        assert decode() == chunk
    else:
        with refuses(InvalidArgument, field):
            decode()


def test_the_widest_row_fits_into_a_message() -> None:
    widest = Features(
        data=bytes(4 * limits.MAX_FEATURE_WIDTH),
        rows=1,
        width=limits.MAX_FEATURE_WIDTH,
        dtype="float32",
        layers=tuple(range(16)),
    )
    chunk = FeatureChunk(session_id="s", features=widest)
    assert list(features.in_messages(chunk)) == [chunk]
    wire = drafting.encode_drafting_call(chunk)
    assert drafting.decode_drafting_call(wire) == chunk
    assert wire.ByteSize() < limits.MAX_DRAFT_MESSAGE_BYTES


@pytest.mark.parametrize(("rows", "pieces"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_hidden_states_are_split_by_rows(rows: int, pieces: int) -> None:
    data = b"".join(bytes([row]) * (64 << 10) for row in range(rows))
    whole = Features(data=data, rows=rows, width=32 << 10, dtype="float16", start=7, layers=(1, -1))
    parts = [call.features for call in features.in_messages(FeatureChunk(session_id="s", features=whole))]
    assert len(parts) == pieces
    assert b"".join(part.data for part in parts) == data
    assert [part.start for part in parts] == [7 + 16 * number for number in range(pieces)]
    assert sum(part.rows for part in parts) == rows
    # Of a step the last rows come with the report itself, what is before them ahead of it.
    step = replace(STEP, observation=Observation(tree=TREE, features=whole))
    *ahead, last = features.in_messages(step)
    assert [call.features for call in ahead] == parts[:-1]
    assert last == replace(STEP, observation=Observation(tree=TREE, features=parts[-1]))
    assert all(drafting.encode_drafting_call(call).ByteSize() < limits.MAX_DRAFT_MESSAGE_BYTES for call in (*ahead, last))


def test_rows_that_no_message_holds_are_left_out_and_their_step_is_not() -> None:
    wide = Features(data=bytes(4 << 20), rows=2, width=1 << 19, dtype="float32")
    assert list(features.in_messages(FeatureChunk(session_id="s", features=wide))) == []
    step = replace(STEP, observation=Observation(tree=TREE, features=wide))
    assert list(features.in_messages(step)) == [replace(STEP, observation=Observation(tree=TREE))]
