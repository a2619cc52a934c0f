"""What a drafter learns of its sources, by adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.merging import calibrators
from services.drafter.merging.calibrators import BlendedRequests, Calibrators
from services.drafter.sessions import text_group
from services.drafter.sessions.text_group import TextGroup
from services.drafter.sessions.tree_walk import prior_of
from speculation.messages import OpenSession, StepReport

BLEND = ("suffix", "recycling")
# The same four tokens again and again, so both sources name the one that comes next.
TEXT = (1, 2, 3, 4) * 10


def answered(group: TextGroup, adapter: str, steps: int, *, right: bool) -> float:
    """The probability of the first token of a draft for the text, before an answer of so many steps."""
    message = OpenSession(session_id="s", tokens=TEXT, prompt_length=len(TEXT), sources=BLEND, max_nodes=4, adapter=adapter)
    session, length = group.open(message, BLEND), len(TEXT)
    first = session.draft(4)
    assert first.tokens[0] == TEXT[0]
    for step in range(steps):
        token = TEXT[step % len(TEXT)] if right else 1000 + step
        length += 1
        session.observe(
            StepReport(session_id="s", committed=(token,), length=length, prefix_hash=0, accepted_path=(), max_nodes=4)
        )
        session.draft(4)
    session.close()
    return first.scores[0]


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "reference"])
def test_an_adapter_that_is_always_drafted_wrong_for_spoils_no_other(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        for module in (calibrators, text_group):
            monkeypatch.setattr(module, "drafting_library", lambda: None)
    group = TextGroup(DrafterConfig())
    begins = answered(group, "", 40, right=True)
    learnt = answered(group, "", 0, right=True)
    # It begins with what is known of the model itself.
    assert answered(group, "wrong", 0, right=False) == learnt > begins
    for _ in range(20):
        answered(group, "wrong", 2, right=False)
    assert answered(group, "wrong", 0, right=False) < 0.5 * learnt
    assert answered(group, "", 0, right=True) == learnt
    assert answered(group, "another", 0, right=True) == learnt


def test_what_adapters_taught_is_not_saved_and_their_number_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrators, "_MOST_OF_ADAPTERS", 2)
    held = Calibrators(DrafterConfig(calibration=tmp_path / "kept"), prior_of)
    first, second = (held.of(BlendedRequests(names=("a",), sampled=False, adapter=name)) for name in ("one", "two"))
    first.learn([(7, ("a:1",))], 7)
    held.save()
    assert not [path for path in tmp_path.iterdir() if "one" in path.name or "a:1" in path.read_text()]
    assert held.of(BlendedRequests(names=("a",), sampled=False, adapter="one")) is first
    held.of(BlendedRequests(names=("a",), sampled=False, adapter="three"))
    assert held.of(BlendedRequests(names=("a",), sampled=False, adapter="one")) is first
    assert held.of(BlendedRequests(names=("a",), sampled=False, adapter="two")) is not second
