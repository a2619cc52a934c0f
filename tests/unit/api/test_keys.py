"""Keys files: what is read, what is refused by name, and how a change arrives without a restart."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.access import key_ring
from services.access.audit import AuditLog
from services.access.key_records import KeyRecord, hash_key, new_key, parse_keys, read_keys
from services.access.key_ring import KeyRing
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

HASH = hash_key("k" * 20)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def test_a_record_needs_its_hash_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- hash: {HASH}\n")
    (record,) = read_keys(file)
    assert (record.id, record.tenant, record.weight) == (HASH[:16], HASH[:16], 1.0)
    assert record.scopes == {"generate", "forget"}
    assert record.requests_per_minute is record.expires is record.strategies is None
    file.write_text(
        f"- {{hash: {HASH}, id: a, tenant: t, scopes: [forget], requests_per_minute: 5, weight: 2,\n"
        "   strategies: [suffix], expires: 2030-01-31, max_tokens: 7, max_concurrent: 2, tokens_per_minute: 9}\n"
    )
    (record,) = read_keys(file)
    assert record.expires == datetime(2030, 1, 31, tzinfo=UTC)
    assert (record.strategies, record.scopes) == ({"suffix"}, {"forget"})
    assert (record.max_tokens, record.max_concurrent, record.tokens_per_minute) == (7, 2, 9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: 1", "must be a list"),
        ("- 5", "key 1 is '5': must be a mapping"),
        ("- {id: x}", "hash is 'null': must be 64 hex digits"),
        (f"- {{hash: {HASH}, rpm: 5}}", "unknown field 'rpm'"),
        (f"- {{hash: {HASH}, requests_per_minute: 0}}", "requests_per_minute is '0': must be a whole number"),
        (f"- {{hash: {HASH}, max_concurrent: true}}", "max_concurrent is 'true'"),
        (f"- {{hash: {HASH}, weight: .inf}}", "weight is 'inf': must be a number from 0.01 to 100"),
        (f"- {{hash: {HASH}, scopes: [root]}}", "scopes is 'root': must be of generate, forget"),
        (f"- {{hash: {HASH}, strategies: [blend, sufix]}}", "strategies is 'sufix': must be of anpd, auto,"),
        (f"- {{hash: {HASH}, expires: soon}}", "expires is 'soon': must be a date"),
        (f"- {{hash: {HASH}, tenant: 'a b'}}", "tenant is 'a b'"),
        (f"- {{hash: {HASH}}}\n- {{hash: {HASH}, id: y}}", "two keys have the hash"),
        (f"- {{hash: {HASH}, id: y}}\n- {{hash: {hash_key('z')}, id: y}}", "two keys have the id y"),
        ("- [", "server.keys_file is"),
        ("\x00", "server.keys_file is"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        KeyRing(file=file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="server.keys_file", value="none.yaml"):
        KeyRing(file=tmp_path / "none.yaml")


def test_a_change_counts_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "keys.yaml", Clock()
    one, two, plain = "one" * 8, "two" * 8, "plain" * 4
    file.write_text(f"- hash: {hash_key(one)}\n")
    ring = KeyRing([hash_key(plain)], file, clock=clock)
    assert ring.find(one)
    assert ring.find(plain)
    assert not ring.find(two)

    def noticed() -> None:
        clock.at += 2
        ring.find(plain)
        ring.settle()

    def write(text: str) -> None:
        file.write_text(text)
        os.utime(file, ns=(0, 10**9 * int(clock.at)))
        noticed()

    write(f"- hash: {hash_key(two)}\n")
    assert ring.find(two)
    assert not ring.find(one)
    assert ring.find(plain)
    with caplog.at_level(logging.ERROR):
        write("- nonsense")
        assert ring.find(two)
        assert "the keys stay as they were" in caplog.text
        file.unlink()
        noticed()
        assert ring.find(two)
    write("[]")
    assert not ring.find(two)
    assert not ring.open


def test_a_file_that_takes_long_to_read_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, clock, go = tmp_path / "keys.yaml", Clock(), threading.Event()
    one, two = "one" * 8, "two" * 8
    file.write_text(f"- hash: {hash_key(one)}\n")
    ring = KeyRing((), file, clock=clock)
    told: list[tuple[str, int]] = []
    ring.tell_reload = lambda outcome, keys: told.append((outcome, keys))

    def slow(content: bytes, path: Path) -> tuple[KeyRecord, ...]:
        go.wait(60)
        return parse_keys(content, path)

    monkeypatch.setattr(key_ring, "parse_keys", slow)
    file.write_text(f"- hash: {hash_key(two)}\n# longer")
    clock.at += 2
    # The old keys count meanwhile.
    assert ring.find(one) and not ring.find(two) and not told
    go.set()
    ring.settle()
    assert ring.find(two) and not ring.find(one)
    file.write_text("- nonsense")
    clock.at += 2
    assert ring.find(two)
    ring.settle()
    assert told == [("ok", 1), ("refused", 1)]


@pytest.mark.parametrize("lacking", ["files", "threads"])
def test_a_change_that_could_not_be_read_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    file, clock = tmp_path / "keys.yaml", Clock()
    one, two = "one" * 8, "two" * 8
    file.write_text(f"- hash: {hash_key(one)}\n")
    ring = KeyRing((), file, clock=clock)
    file.write_text(f"- hash: {hash_key(two)}\n# longer")

    def look() -> bool:
        clock.at += 2
        ring.find(one)
        ring.settle()
        return ring.find(one) is not None

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files") if lacking == "files" else RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(*((Path, "open") if lacking == "files" else (threading.Thread, "start")), none_left)
        assert look() and look() and look()
    assert caplog.text.count("cannot be read") == 1
    assert not look()
    assert ring.find(two)


def test_new_keys_are_random_and_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == len("outrider_") + 43 for key in keys)


def test_the_audit_log_outlives_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "audit.jsonl", Clock()
    audit = AuditLog(str(file), now=clock)
    audit.write(outcome="ok", address="x" * 1000)
    file.rename(tmp_path / "old.jsonl")
    audit.write(outcome="later\nline")
    (line,) = file.read_text().splitlines()
    assert json.loads(line) == {"time": "1970-01-01T00:16:40.000+00:00", "outcome": r"later\nline"}
    assert len(json.loads((tmp_path / "old.jsonl").read_text())["address"]) == 256
    with caplog.at_level(logging.ERROR):
        file.unlink()
        file.mkdir()
        audit.write(outcome="lost")
        audit.write(outcome="lost")
        assert caplog.text.count("a line of the audit log is lost") == 1
    with refuses(ConfigurationError, field="server.audit_log", value="no/such/folder"):
        AuditLog(str(tmp_path / "no" / "such" / "folder"))
