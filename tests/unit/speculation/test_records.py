"""Records that are made quickly are those that their class makes."""

from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from services.verifier.model.target_port import Outcome, Rows
from speculation.acceptance import Accepted, StopRule
from speculation.messages import Draft, Progress, StepReport
from speculation.records import maker
from speculation.types import Observation, TokenTree, Verdict

MADE = (Accepted, Draft, Observation, Outcome, Progress, Rows, StepReport, StopRule, TokenTree, Verdict)


@pytest.mark.parametrize("made", MADE)
def test_a_maker_gives_what_the_class_gives(made: Any) -> None:
    every = {each.name: object() for each in fields(made)}
    needed = {name: value for name, value in every.items() if name not in (made.__init__.__kwdefaults__ or {})}
    for given in (every, needed):
        one, other = maker(made)(**given), made(**given)
        assert type(one) is made
        assert all(getattr(one, name) is getattr(other, name) for name in every)


def test_wrong_arguments_are_refused() -> None:
    make = maker(Accepted)
    with pytest.raises(TypeError, match="finish_reason"):
        make(path=(), tokens=())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="other"):
        make(path=(), tokens=(), finish_reason=None, other=1)  # type: ignore[call-arg]


def test_a_field_that_is_made_anew_each_time_is_refused() -> None:
    @dataclass(kw_only=True)
    class Held:
        entries: list[int] = field(default_factory=list)

    with pytest.raises(TypeError, match="entries"):
        maker(Held)
