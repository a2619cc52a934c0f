"""docs/clients.md and the files of clients agree, and whatever a client needs is pinned."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients import judging, scripts, table
from tests.clients.recorder import Asked

SCRIPTS = scripts.scripts()


def test_the_page_has_every_client_in_the_version_that_is_pinned() -> None:
    rows = table.rows()
    assert rows.keys() == {script.name for script in SCRIPTS} and len(rows) >= 20
    for script in SCRIPTS:
        assert f"| {table.package_of(script)} | {script.doors} |" in rows[script.name], (
            f"python -m tests.clients {script.name}"
        )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_feature_is_tried_or_has_a_note(script: scripts.Script) -> None:
    text, cells = script.path.read_text(), table.rows()[script.name].split(" | ")[3:7]
    for feature, cell in zip(judging.FEATURES, cells, strict=True):
        tried = re.search(rf"^(def |  (async )?){feature}(\(url\)|: \(url\))", text, re.MULTILINE) is not None
        assert tried == (cell != "—"), feature
        assert cell == "yes" or f"- `{script.name}`, {feature}: {script.notes[feature]}" in table.PAGE.read_text()


@pytest.mark.parametrize("needs", ["openai", "openai>=3", "openai==3.*", "openai@git+https://there"])
def test_what_is_not_pinned_is_refused(needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python/with_some.py").write_text(f'# /// script\n# dependencies = ["{needs}"]\n# ///\n"""Some."""\n')
    monkeypatch.setattr(scripts, "HERE", tmp_path)
    with pytest.raises(ValueError, match="pin"):
        scripts.scripts()


def test_what_clients_are_asked_is_the_same_in_both_languages() -> None:
    """The constants of asked.py are those of asked.mjs."""
    python = (scripts.HERE / "python/asked.py").read_text()
    node = (scripts.HERE / "node/asked.mjs").read_text()
    for name, pattern in (("QUESTION", '"(.*)"'), ("CALL", "'(.*)'")):
        found = [re.search(rf"^(?:export const )?{name} = {pattern}", text, re.MULTILINE) for text in (python, node)]
        assert found[0] and found[1] and found[0][1] == found[1][1]
    assert "SHORT, LONG, WHOLE = 24, 64," in python and "SHORT = 24, LONG = 64;" in node


def test_a_client_prints_what_it_gave_or_why_it_failed(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text((scripts.HERE / "python/asked.py").read_text())
    (tmp_path / "with_some.py").write_text(
        "import asked\ndef default(url): return url\ndef stream(url): return 1 / 0\nasked.run(default, stream)"
    )
    variables = {"CLIENT_URL": "http://there", "CLIENT_MODEL": "some"}
    done = subprocess.run(
        [sys.executable, tmp_path / "with_some.py"], env=variables, capture_output=True, text=True, check=True
    )
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["feature"], first["gave"]) == ("default", "http://there/default")
    assert (second["feature"], second["error"]) == ("stream", "ZeroDivisionError: division by zero")


PARIS = {"name": "weather", "arguments": {"city": "Paris"}}
WHOLE = {"choices": [{"message": {"content": "red, green", "tool_calls": None}}]}
CALLED = {
    "choices": [
        {"message": {"content": None, "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]}}
    ]
}
OBJECT = {"choices": [{"message": {"content": '{"colour": "red", "warm": true}'}}]}


@pytest.mark.parametrize(
    ("feature", "gave", "plain", "more", "why"),
    [
        ("default", "red, green", WHOLE, {}, None),
        ("default", "red, green ", WHOLE, {}, "is not"),
        ("stream", ["red", ",", " green"], WHOLE, {"stream": True}, None),
        ("stream", ["red, green"], WHOLE, {"stream": True}, "pieces"),
        ("stream", ["red", ",", " green"], WHOLE, {}, "no stream"),
        ("tools", PARIS, CALLED, {"tools": [1]}, None),
        ("tools", {**PARIS, "arguments": {}}, CALLED, {"tools": [1]}, "is not"),
        ("structured", {"colour": "red", "warm": True}, OBJECT, {}, None),
        ("structured", {"colour": "red", "warm": False}, OBJECT, {}, "is not"),
        ("structured", {"colour": "pink", "warm": True}, OBJECT, {}, "pink"),
    ],
)  # fmt: skip
def test_a_wrong_answer_fails(
    feature: str, gave: Any, plain: Any, more: dict[str, Any], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer:
        status_code = 200

        def json(self) -> Any:
            return plain

    monkeypatch.setattr("tests.clients.plain_http._CLIENT.post", lambda *_, **__: Answer())
    asked = [Asked("/v1/chat/completions", {"temperature": 0, **more}, 200, "", bytearray())]
    told = judging.judge("http://there", feature, {"gave": gave}, asked)
    assert told is None if why is None else told is not None and why in told


def test_what_the_server_refuses_or_the_client_does_not_say_fails() -> None:
    refused = Asked("/v1/chat/completions", {}, 400, "no", bytearray())
    assert "refused" in str(judging.judge("", "default", {"gave": "x"}, [refused]))
    assert "without an answer" in str(judging.judge("", "default", None, []))
    assert judging.judge("", "default", {"error": "Odd: yes"}, []) == "Odd: yes"
    assert "not asked" in str(judging.judge("", "default", {"gave": "x"}, []))
