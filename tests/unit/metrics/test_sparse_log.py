"""A peer that misbehaves a thousand times a second writes few lines."""

from __future__ import annotations

import logging

import pytest

from services.logs.sparse import SparseLog


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


def test_how_seldom_and_how_loud(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk, missing descriptors and refused components are told by the same mechanism, as errors, once a minute."""
    seconds = 0.0
    log = SparseLog(logging.getLogger("sparse"), every_s=60.0, clock=lambda: seconds)
    for step in range(121):
        seconds = float(step)
        log.error("disk", "a line is lost: %s", "full")
    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [
        (logging.ERROR, "a line is lost: full"),
        (logging.ERROR, "a line is lost: full (and 59 more like it since the last line)"),
        (logging.ERROR, "a line is lost: full (and 59 more like it since the last line)"),
    ]
