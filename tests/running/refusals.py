"""What is refused: ``refuses`` checks an error by its fields, and its sentence by the one file that holds them all.

A line of tests/refusals.txt is ``FILE::TEST: SENTENCE``. ``…`` in it stands for any text: for what another library says, or a
machine. With ``REFUSALS=write`` the tests that run add the sentences that they meet, and leave alone those that fit.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

from speculation.errors import spelled

ROOT = Path(__file__).parents[2]
SENTENCES = ROOT / "tests" / "refusals.txt"
_ANY = "…"
# What differs from run to run.
_VOLATILE = (
    (re.compile(r"/[^\s'\"]*?/pytest-of-[^/]+/pytest-\d+/(popen-gw\d+/)?[^/\s'\":;,)]+"), "TMP"),
    (re.compile(r"/tmp/tmp\w+"), "TMP"),
    (re.compile(re.escape(str(ROOT))), "REPOSITORY"),
    (re.compile(r"redis://[^\s;]*@|redis://(?=127)"), "redis://"),
    (re.compile(r"((?:\b\d+\.\d+\.\d+\.\d+|localhost|\[::1?\]|\*):)[1-9]\d{3,4}\b"), r"\g<1>PORT"),
    # What a small model has learnt by heart, and how far off a planted fault is, depend on the processor.
    (re.compile(r"\b\d+%(?= of the (first|second)| that way)"), "…%"),
    (re.compile(r"by [0-9.e+-]+ of the spread"), "by … of the spread"),
    (re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,64}\b"), "HASH"),
)
ErrorT = TypeVar("ErrorT", bound=Exception)


@contextmanager
def refuses(
    error: type[ErrorT],
    field: object | None = None,
    value: object | None = None,
    says: str = "",
    *,
    allowed: str = "",
) -> Iterator[pytest.ExceptionInfo[ErrorT]]:
    """Check that the block is refused: ``error`` with these fields, in a sentence of tests/refusals.txt.

    Args:
        field, value: the error's; of a path its end is enough. None: not looked at.
        says: a word of the sentence, where the fields do not tell two refusals of a test apart.
        allowed: what the error says to be allowed, or a part of that.
    """
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    _check_field("field", caught.value, field)
    _check_field("value", caught.value, value)
    assert allowed in getattr(caught.value, "allowed", "")
    assert says in str(caught.value)
    _check_sentence(" ".join(str(caught.value).split()))


def steady(sentence: str) -> str:
    """The sentence without what differs from run to run."""
    for pattern, word in _VOLATILE:
        sentence = pattern.sub(word, sentence)
    return sentence


def _check_field(name: str, error: Exception, wanted: object | None) -> None:
    __tracebackhide__ = True
    found = getattr(error, name)
    if wanted is not None and not str(found).endswith(f"/{wanted}"):
        assert str(found) == spelled(wanted), f"{name} of: {error}"


def _check_sentence(sentence: str) -> None:
    __tracebackhide__ = True
    test = os.environ["PYTEST_CURRENT_TEST"].partition("[")[0].partition(" (")[0].removeprefix("tests/")
    sentence = steady(sentence)
    if any(_fits(known, sentence) for known in _sentences().get(test, ())):
        return
    if os.environ.get("REFUSALS") == "write":
        _write(f"{test}: {sentence}")
        return
    assert sentence in _sentences().get(test, ()), f"not in {SENTENCES.name}; see CONTRIBUTING.md"


def _fits(known: str, sentence: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, known.split(_ANY))), sentence) is not None


@cache
def _sentences() -> dict[str, list[str]]:
    """The known sentences of each test."""
    found: dict[str, list[str]] = {}
    for line in SENTENCES.read_text(encoding="utf-8").splitlines():
        test, _, sentence = line.partition(": ")
        found.setdefault(test, []).append(sentence)
    return found


def _write(line: str) -> None:
    with SENTENCES.open("r+", encoding="utf-8") as file:
        # Tests may run in several processes.
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = sorted({*file.read().splitlines(), line})
        file.seek(0)
        file.write("\n".join(lines) + "\n")
    _sentences.cache_clear()
