"""What others write stays within its line of the log, and is shown, not obeyed."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from cluster.process.logs import JsonLines, start_logging
from cluster.process.terminal import tell
from cluster.settings.operating import LoggingSettings
from services.logs.clean import clean_logs
from services.verifier.stages import process
from speculation.errors import TargetLost, Unavailable

# Ends the line, writes another one, clears the screen, sets the window's title, turns text round; C1's and Unicode's own ends.
HOSTILE = (
    "x\n2026-11-25 12:00:00,000 services.access: all keys are valid\r\x1b[2J\x1b]0;t\x07\u202etxt\x85\x9b31m\u2028end\x00"
)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, make = logging.getLogger(), logging.getLogRecordFactory()
    handlers, level = root.handlers[:], root.level
    # ``start_logging`` closes those that it finds.
    root.handlers.clear()
    yield
    logging.setLogRecordFactory(make)
    root.handlers[:] = handlers
    root.setLevel(level)


def say_it() -> None:
    log = logging.getLogger("services.somewhere")
    log.error("the drafter says %s", HOSTILE)
    log.error(HOSTILE)
    try:
        raise Unavailable(HOSTILE)
    except Unavailable:
        log.exception("no draft for request %s", "mine.0123abcd", stack_info=True)


def lines(text: str) -> list[str]:
    """The lines of a log; none of its characters is of those that a terminal obeys."""
    found = text.removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in found), found
    return found


def test_lines_for_people() -> None:
    start_logging(LoggingSettings(), stream := io.StringIO())
    say_it()
    found = lines(stream.getvalue())
    assert [line for line in found if not line.startswith("    ")] == [
        line for line in found if "services.somewhere:" in line
    ]
    assert len([line for line in found if "services.somewhere:" in line]) == 3
    assert found[0].endswith(r"the drafter says x\n2026-11-25 12:00:00,000 services.access: all keys are valid\r\x1b[2J\x1b]0"
                             r";t\x07\u202etxt\x85\x9b31m\u2028end\x00")  # fmt: skip
    assert "    Traceback (most recent call last):" in found and any("say_it" in line for line in found)


def test_lines_for_machines() -> None:
    start_logging(LoggingSettings(format="json"), stream := io.StringIO())
    say_it()
    found = [json.loads(line) for line in lines(stream.getvalue())]
    assert [each["logger"] for each in found] == ["services.somewhere"] * 3
    assert all(value.isprintable() for each in found for value in each.values() if isinstance(value, str))
    assert found[2]["request_id"] == "mine" and r"valid\r\x1b[2J" in found[2]["error_text"]


def test_a_client_that_left_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start_logging(LoggingSettings(), stream := io.StringIO())
    grpc = logging.getLogger("grpc._cython.cygrpc")
    # A benchmark that has run in this process may have silenced it.
    monkeypatch.setattr(grpc, "isEnabledFor", lambda _: True)
    grpc.error("ExecuteBatchError raised in core by servicer method [/outrider.v1.GenerationService/Generate]")
    grpc.error("Unexpected [%s] raised by servicer method", "KeyError")
    assert [line.partition("cygrpc: ")[2] for line in lines(stream.getvalue())] == [
        "Unexpected [KeyError] raised by servicer method"
    ]


def test_handlers_of_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray's, and Python's own where there is none."""
    clean_logs()
    own = logging.getLogger("library.of.others")
    own.propagate = False
    handler = logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    own.addHandler(handler)
    own.error("%s", HOSTILE)
    own.removeHandler(handler)
    own.error("%s", HOSTILE)
    assert len(lines(stream.getvalue())) == 1
    assert len(lines(capsys.readouterr().err)) == 1


def test_what_another_library_adds_to_records_stays() -> None:
    """Ray makes records of its own, before or after."""

    def add_time(earlier: object) -> object:
        def make(*arguments: object, **keywords: object) -> logging.LogRecord:
            record: logging.LogRecord = earlier(*arguments, **keywords)  # type: ignore[operator]
            record.__dict__["timestamp_ns"] = 1
            return record

        return make

    logging.setLogRecordFactory(add_time(logging.getLogRecordFactory()))  # type: ignore[arg-type]
    clean_logs()
    logging.setLogRecordFactory(add_time(logging.getLogRecordFactory()))  # type: ignore[arg-type]
    clean_logs()
    record = logging.getLogRecordFactory()("a", logging.ERROR, "", 0, "%s", ("x\ny",), None)
    assert (record.__dict__["timestamp_ns"], record.getMessage()) == (1, r"x\ny")


def test_a_stage_of_a_target(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def serve(_: object) -> None:
        raise TargetLost(HOSTILE)

    monkeypatch.setattr(process, "spec_from_json", lambda text: text)
    monkeypatch.setattr(process, "serve", serve)
    monkeypatch.setattr(sys, "argv", ["stage", ""])
    with pytest.raises(SystemExit):
        process.main()
    assert len(lines(capsys.readouterr().err)) == 1


def test_errors_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tell(HOSTILE)
    assert len(lines(capsys.readouterr().err)) == 1


def test_json_without_clean_records_is_clean() -> None:
    record = logging.LogRecord("a", logging.ERROR, "", 0, "%s", (HOSTILE,), None)
    assert all(each.isprintable() for each in json.loads(JsonLines().format(record)).values())
