"""The words that the client's options may be are those that Outrider has."""

from __future__ import annotations

from typing import get_args, get_type_hints

import outrider
from outrider.v1 import generation_pb2 as pb
from speculation import types
from speculation.sources import STRATEGIES


def test_they_are_those_of_the_idea() -> None:
    assert get_args(outrider.Strategy) == tuple(STRATEGIES)
    assert get_args(outrider.Acceptance) == get_args(types.AcceptanceRule)
    assert get_args(outrider.Report) == get_args(types.Report)


def test_a_message_has_the_fields_of_the_wire() -> None:
    assert {*get_type_hints(outrider.Message)} == {*pb.ChatMessage.DESCRIPTOR.fields_by_name}


def test_every_option_of_sampling_can_be_set() -> None:
    assert {*pb.SamplingParams.DESCRIPTOR.fields_by_name} <= {*get_type_hints(outrider.Options)}
