"""A peer that misbehaves a thousand times a second writes few lines."""

from __future__ import annotations

import logging

import pytest

from services.sparse_log import SparseLog


def test_a_line_now_and_then_says_how_often(caplog: pytest.LogCaptureFixture) -> None:
    seconds = 0.0
    log = SparseLog(logging.getLogger("sparse"), clock=lambda: seconds)
    written = []
    for step in range(2500):
        seconds = step / 100
        written.append(log.warning("the drafter", "dropped a draft: %s", f"tree {step}"))
        log.warning("another", "dropped %s", "one")
    ours = [record.getMessage() for record in caplog.records if "draft:" in record.getMessage()]
    assert sum(written) == 3
    assert ours == [
        "dropped a draft: tree 0",
        "dropped a draft: tree 1000 (and 999 more like it since the last line)",
        "dropped a draft: tree 2000 (and 999 more like it since the last line)",
    ]
    assert len(caplog.records) == 6
