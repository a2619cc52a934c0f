"""Refusals of a chat, in the words of the body of Anthropic's that asked for it."""

from __future__ import annotations

import pytest

from services.api.http.messages.own_names import in_own_names
from speculation.errors import InvalidArgument


@pytest.mark.parametrize(("chat", "own"), [(False, "true"), (True, "false")])
def test_one_call_at_a_time_is_the_opposite_there(chat: bool, own: str) -> None:
    error = in_own_names(InvalidArgument("parallel_tool_calls", chat, "unset"), ())
    assert (error.field, error.value) == ("tool_choice.disable_parallel_tool_use", own)
