"""Fixtures that several suites share."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running import left_behind, time_left
from tests.running.finalizers import no_finalizers
from tests.running.grouping import GroupScheduling
from tests.running.room_for_calls import with_room

# What command lines under test learn of tiny models is of no use to whoever runs the tests.
os.environ.setdefault("OUTRIDER_DRAFTER__KEEP_CALIBRATION", "false")
os.environ.setdefault("OUTRIDER_VERIFIER__KEEP_LEARNT", "false")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model."""
    # It imports transformers' models. The process that hands out the tests, and those that need no model, start without.
    from tests.tiny_models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    """The groups of test files; for other ways of distribution, xdist's own."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Leave out what there is no time for, let everything end with the tests, and let each process of xdist say at once how a test
    begins.

    pytest-rerunfailures tells the process that hands out the tests, in two short messages. The kernel would hold the second one
    back until the first is acknowledged, which takes 40 ms: as long as most tests.
    """
    config.pluginmanager.register(time_left)
    left_behind.end_with_this_process()
    reporting: socket.socket | None = getattr(getattr(config, "failures_db", None), "sock", None)
    if reporting is not None:
        reporting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Import the tests, which pytest parses.

    Afterwards they and all that they import, some million objects, are no garbage: a collection during a test need not look
    at them.
    """
    with no_finalizers():
        try:
            yield
        finally:
            gc.freeze()


def pytest_runtestloop(session: pytest.Session) -> object:
    """Whoever runs the tests here runs them with room for their calls."""
    others = session.config.pluginmanager.subset_hook_caller("pytest_runtestloop", [sys.modules[__name__]])
    return with_room(others)(session=session)


def pytest_collection_finish() -> None:
    """Where some test's module has kernels for GPUs, make their interpreter quick; the others need not import it."""
    if "triton.runtime.interpreter" in sys.modules:
        from tests.kernels.quick_interpreter import quicken

        quicken()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """The same where a test has failed, since pytest parses the files of its traceback."""
    with no_finalizers():
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests failed that were run once more: whoever looks for the cause has nothing else."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"the first time: {report.nodeid}", "_")
        terminalreporter.line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.section(title, "-")
            terminalreporter.line(text)


# Libraries complain of what is left at the process's end. Before that, pytest collects ten times.
atexit.register(gc.unfreeze)
# Nobody reads what xdist's processes would complain of then, and each would take its million objects apart for seconds.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)


# A test that fails is run once more where machines are shared (.ci/tests). These are if they took too long, and not if they have
# said anything: whatever the machine does, no token may be wrong.
_FINAL = re.compile(r"tests/(lossless/|contract/test_[a-z]+_links)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say of each test whether its first outcome is final, and of a test's cases which of them stand for all in `make test`."""
    cases: Counter[str] = Counter()
    for item in items:
        if _FINAL.match(item.nodeid):
            reruns = item.config.getoption("reruns") or 0
            item.add_marker(pytest.mark.flaky(reruns=reruns, only_rerun=TimeoutError, rerun_except=AssertionError))
        if (one_in := item.get_closest_marker("examples")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % one_in.args[0]:
                item.add_marker(pytest.mark.exhaustive)
            cases[test] += 1


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Command lines under test set the level of their process's log, and how it looks for garbage: it is the tests' as well."""
    level, garbage = logging.root.level, gc.get_threshold()
    yield
    # Setting it makes all loggers forget what they have found out, of which transformers' models alone have a thousand.
    if logging.root.level != level:
        logging.root.setLevel(level)
    gc.set_threshold(*garbage)
