"""What a target on a device waits for, and what is under way by then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.verifier.choosing import likeliest_ids
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.reading import LogitsReader
from services.verifier.model.graphs import Made
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows, SingleRows, reads_all, rows_read

WAIT_S = 0.2


def finished(likeliest: Callable[[], list[int]] | None, device: str, outcomes: Callable[..., Any]) -> float:
    """Seconds of choosing that a target tells of a pass."""
    target: Any = object.__new__(TransformersTarget)
    target._under_way = deque([([], None)])
    target._part = SimpleNamespace(likeliest=likeliest, best=None, device=torch.device(device))
    target._chooser = SimpleNamespace(outcomes=outcomes)
    target.end_pass = lambda: torch.zeros(0, 1)
    target.finish()
    return float(target.choosing_s)


def slow() -> list[int]:
    time.sleep(WAIT_S)
    return []


def waits(batch: object, logits: object, likeliest: Callable[[], list[int]]) -> None:
    likeliest()


def takes_long(batch: object, logits: object, likeliest: object) -> None:
    time.sleep(WAIT_S)


def test_waiting_for_a_captured_pass_is_no_choosing() -> None:
    """It is the pass's own time, by which the budget learns what rows cost."""
    assert finished(slow, "cuda", waits) < WAIT_S / 2
    assert finished(list, "cuda", takes_long) >= WAIT_S


def test_a_launched_pass_is_not_told_from_its_choices_on_a_device() -> None:
    assert finished(None, "cuda", takes_long) == 0
    assert finished(None, "cpu", takes_long) >= WAIT_S


def test_likeliest_ids_are_sent_for_before_choices_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    trees = [
        Rows(request_id="a", context=4, tokens=(1, 2, 3), parents=(-1, 0), logits=3, top_k=4),
        Rows(request_id="b", context=9, tokens=(7,), logits=1),
        Rows(request_id="c", context=2, tokens=(5,), logits=1, top_k=2),
    ]

    def chosen(reader: LogitsReader, likeliest: Callable[[], list[int]] | None) -> Any:
        chooser = Chooser(reader=reader)
        for rows in trees:
            chooser.open(rows.request_id, None)
        return chooser.outcomes(trees, logits, likeliest)

    told: list[str] = []
    send = likeliest_ids.on_the_way

    def sent(numbers: torch.Tensor) -> Callable[[], list[Any]]:
        told.append("sent")
        come = send(numbers)
        return lambda: told.append("read") or come()

    monkeypatch.setattr(likeliest_ids, "on_the_way", sent)
    found = chosen(LogitsReader(on_host=lambda _: False), lambda: told.append("waited") or logits.argmax(-1).tolist())
    assert told == ["sent", "sent", "waited", "read", "read"]
    expected = chosen(LogitsReader(), None)
    assert [each.choices for each in found] == [each.choices for each in expected]
    assert [each.top_ids for each in found] == [each.top_ids for each in expected]
    assert found[0].top_ids == tuple(tuple(row) for row in logits[:3].topk(4).indices.tolist())
    assert found[1].top_ids == ()


def test_rows_of_a_captured_pass_are_picked_where_some_are_not_read() -> None:
    whole = [
        Rows(request_id="a", context=4, tokens=(1, 2, 3), parents=(-1, 0), logits=3),
        Rows(request_id="b", context=9, tokens=(7,), logits=1),
    ]
    some = [*whole, Rows(request_id="c", context=0, tokens=(5, 6, 7), logits=1)]
    scored = [*whole, Rows(request_id="c", context=0, tokens=(5, 6, 7), logits=1, scored=(6, 7))]
    singles = SingleRows(["a", "b"], [4, 9], [3, 7])
    for batch, all_read in ((whole, True), (some, False), (scored, False), (singles, True)):
        count = sum(len(rows.tokens) for rows in batch)
        assert reads_all(batch) is all_read
        assert not all_read or rows_read(batch) == list(range(count))
        made = Made(torch.arange(2.0 * count).view(count, 2), {}, torch.arange(count))
        part: Any = SimpleNamespace(is_last=True, device=torch.device("cpu"), likeliest=None)
        found = ModelSlice._replay(part, lambda _, made=made: made, batch, None, None)
        assert torch.equal(found, made.rows[rows_read(batch)])
        assert part.likeliest() == rows_read(batch)
