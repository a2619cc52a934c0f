"""``outrider index`` as a user types it, on a tiny model: build, look, publish, use; and wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from retrieval_index import store as store_module
from retrieval_index.embedded import embedded_redis
from retrieval_index.store import IndexStore
from tests.drafters.indexes import build
from tests.e2e.command_line import SMALL
from tests.e2e.conftest import Command

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


def test_an_index_from_build_to_use(outrider_here: Command, tiny_model: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(6):
        (corpus / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog again\n" * 3)
    index = str(tmp_path / "index")
    built = outrider_here(
        "index", "build", "--corpus", str(corpus), "--out", index, "--model", str(tiny_model), "--keep", "0.5"
    )
    assert built.returncode == 0, built.stderr
    assert "3 of 6 kept" in built.stdout
    others = ["--keep", "0.5", "--keep-by", "tokens", "--score-tokens"]
    again = [
        "index",
        "build",
        "--corpus",
        str(corpus),
        "--out",
        str(tmp_path / "other"),
        "--model",
        str(tiny_model),
        *others,
    ]
    told = outrider_here(*again, "all").stdout
    assert "perplexity of whole documents" in told and "by tokens" in told
    assert "--score-tokens" in outrider_here(*again, "most").stderr
    looked = outrider_here("index", "inspect", index, "--text", "jumps over the")
    assert "lazy dog" in looked.stdout, looked.stderr
    assert json.loads(outrider_here("index", "inspect", index, "--json").stdout)["kept"] == 3
    assert "is whole" in outrider_here("index", "verify", index).stdout
    answers = []
    for strategy in ("autoregressive", "rest", "spectra", "blend"):
        done = outrider_here(
            "generate", "the quick brown", "--in-process", "--model", str(tiny_model), *SMALL, "--strategy", strategy,
            "--max-tokens", "30", "--temperature", "0.8", "--seed", "7", "--json", "--set", f"retrieval.index={index}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["token_ids"])
    assert all(answer == answers[0] for answer in answers)
    planned = outrider_here("plan", "--model", str(tiny_model), "--set", f"retrieval.index={index}")
    assert re.search(r"retrieval.*looks up in", planned.stdout), planned.stderr
    with embedded_redis() as url:
        published = outrider_here("index", "publish", index, "--redis", url)
        assert "is live" in published.stdout, published.stderr
        (version,) = json.loads(outrider_here("index", "list", "--redis", url, "--json").stdout)
        assert version["live"]
        assert outrider_here("index", "promote", version["version"], "--redis", url).returncode == 0
        refused = outrider_here("index", "rollback", "--redis", url)
        assert refused.returncode != 0
        assert "has had no version before the live one" in refused.stderr
        assert url.split(":")[2].split("@")[0] not in refused.stderr


def test_no_command_leaves_a_connection_open(
    outrider_here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[IndexStore] = []
    closed: list[IndexStore] = []
    monkeypatch.setattr(IndexStore, "close", lambda store: (closed.append(store), store._redis.close()))

    def connect(*given: str) -> IndexStore:
        opened.append(IndexStore(*given))
        return opened[-1]

    monkeypatch.setattr(store_module, "IndexStore", connect)
    indexes = [str(tmp_path / name) for name in ("one", "two", "three")]
    versions = [build(Path(folder), [folder]).version for folder in indexes]
    with embedded_redis() as url:
        for arguments, code in (
            *((("publish", folder), 0) for folder in indexes[:2]), (("list",), 0), (("rollback",), 0),
            (("promote", versions[1]), 0), (("publish", indexes[2], "--no-promote"), 0), (("delete", versions[2]), 0),
            (("promote", versions[2]), 2), (("delete", versions[1]), 2),
        ):  # fmt: skip
            done = outrider_here("index", *arguments, "--redis", url)
            assert done.returncode == code, (arguments, done.stderr)
            assert opened == closed, arguments
    assert len(opened) == 9


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["build", "--corpus", "nowhere", "--out", "x"], "--corpus nowhere: cannot be read"),
        (["build", "--corpus", "README.md", "--out", "x", "--keep", "0"], "--keep 0.0: must be above 0"),
        (["inspect", "nowhere"], "nowhere holds no index"),
        (["list", "--redis", "http://x"], "not a Redis URL"),
        (["list", "--redis", "redis://me:secret@127.0.0.1:1"], "redis://***@127.0.0.1:1"),
    ],
)
def test_wrong_input_gets_one_clear_line(outrider_here: Command, arguments: list[str], why: str) -> None:
    done = outrider_here("index", *arguments)
    assert done.returncode != 0
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


def test_an_index_that_is_none_is_refused_at_start(outrider_here: Command, tiny_model: Path, tmp_path: Path) -> None:
    here = ["generate", "x", "--in-process", "--model", str(tiny_model), *SMALL]
    assert "holds no index" in outrider_here(*here, "--set", f"retrieval.index={tmp_path}").stderr
    assert "no retrieval index" in outrider_here(*here, "--strategy", "rest").stderr
    assert "but there is no index" in outrider_here(*here, "--set", "retrieval.semantic=true").stderr
    both = ["--set", f"retrieval.index={tmp_path}", "--set", "retrieval.redis_url=redis://x"]
    assert "set one of the two" in outrider_here(*here, *both).stderr
