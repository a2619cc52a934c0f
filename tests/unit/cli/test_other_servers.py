"""Command lines of vLLM, SGLang and llama-server are refused with what they would be here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import other_servers
from cli.main import app
from cli.other_servers import KNOWN, SETTINGS, STRATEGIES, SWITCHES
from cluster.settings.config import Settings
from speculation.errors import ConfigurationError
from speculation.sources import STRATEGIES as OURS

_DOCS = Path(__file__).parents[3] / "docs" / "tutorials"
# Ours, too.
_OWN = {"--host", "--port", "--model"}

SAID = {
    "vllm": (
        "Qwen/Qwen3-0.6B --max-num-seqs 16 --speculative-config "
        """'{"method": "ngram", "num_speculative_tokens": 5}' --trust-remote-code""",
        "--model Qwen/Qwen3-0.6B --set verifier.max_num_seqs=16 --set router.strategy=prompt_lookup "
        "--set router.num_speculative_tokens=5; --trust-remote-code: code of models is never run",
    ),
    "underscores and =": (
        "--model a --max_model_len=4096 -tp 2 --nobody-s 4",
        "--model a --set verifier.max_model_len=4096 --set verifier.tensor_parallel_size=2; --nobody-s: unknown here",
    ),
    "sglang": (
        "--model-path Qwen/Qwen3-0.6B --max-running-requests 16 --speculative-algorithm NGRAM --disable-radix-cache",
        "--model Qwen/Qwen3-0.6B --set verifier.max_num_seqs=16 --set router.strategy=suffix "
        "--set verifier.enable_prefix_caching=false",
    ),
    "llama-server": (
        "-m a.gguf -c 4096 -md b --spec-type draft-simple,ngram-mod --spec-draft-n-min 1",
        "--model a.gguf --set verifier.max_model_len=4096 --set 'drafter.models=[b]' --set router.strategy=blend; "
        "--spec-draft-n-min: a step drafts as little as pays",
    ),
    "a flag before the model": ("--trust-remote-code a", "--model a; --trust-remote-code: code of models is never run"),
    "two arguments": ("a words", "--model a; words: unknown here"),
    "HTTP's port": (
        "Qwen/Qwen3-0.6B --port 8000 --max-num-seqs 16",
        "--model Qwen/Qwen3-0.6B --set server.http_port=8000 --set verifier.max_num_seqs=16",
    ),
    "a port that is not said": ("a --port", "--model a --set server.http_port=PORT"),
    "a folder with =": ("./runs/lr=1e-4/model -c 4096", "--model ./runs/lr=1e-4/model --set verifier.max_model_len=4096"),
    "several adapters and names": (
        "a --lora-modules one=/a two=/b=c --served-model-name x y",
        "--model a --set 'verifier.lora_modules={one: /a, two: /b=c}' --set 'server.served_model_name=[x, y]'",
    ),
    "a type that is not named": ("a --dtype auto", "--model a; --dtype: float32, or what verifier.dtype names"),
    "adapters": ("--lora-modules one=/a", "--set 'verifier.lora_modules={one: /a}'"),
    "a draft model": (
        """--speculative-config '{"method": "eagle3", "model": "/head", "draft_tensor_parallel_size": 1}'""",
        "--set router.strategy=eagle3 --set 'drafter.models=[/head]'; --speculative-config: what has no place here: "
        "draft_tensor_parallel_size",
    ),
    "a drafter of one's own": (
        """--speculative-config '{"method": "custom_class"}'""",
        "--set router.strategy=auto; --speculative-config: there is no custom_class here",
    ),
    "no JSON": ("--speculative-config ngram", "--set router.strategy=auto; --speculative-config: it is no JSON object"),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_servers, "count_gpus", lambda: 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "a -tp 2",
            "--model a --set verifier.tensor_parallel_size=2 --set verifier.device=cuda --set verifier.dtype=bfloat16",
        ),
        ("a --dtype float32", "--model a --set verifier.dtype=float32 --set verifier.device=cuda"),
        ("a --device cpu", "--model a --set verifier.device=cpu"),
    ],
)
def test_a_gpu_that_theirs_would_take_is_named(given: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_servers, "count_gpus", lambda: 2)
    found = CliRunner().invoke(app, ["serve", *given.split()]).exception
    assert f"outrider serve {said} (docs" in str(found)


@pytest.mark.parametrize("case", SAID)
def test_a_command_line_of_another_server_is_said_as_here(case: str) -> None:
    given, said = SAID[case]
    found = CliRunner().invoke(app, ["serve", *shlex.split(given)]).exception
    assert isinstance(found, ConfigurationError)
    assert f"said otherwise here: outrider serve {said} (docs/tutorials/" in str(found)


def test_what_nobody_knows_is_refused_as_ever() -> None:
    found = CliRunner().invoke(app, ["serve", "--confg", "a"])
    assert found.exit_code == 2 and "No such option: --confg" in found.output


def test_a_port_that_is_not_said_is_refused_as_ever() -> None:
    found = CliRunner().invoke(app, ["serve", "--port"])
    assert found.exit_code == 2 and "requires an argument" in found.output


@pytest.mark.parametrize("column", [1, 2], ids=["vllm", "sglang"])
def test_every_flag_of_the_tables_is_known(column: int) -> None:
    lines = (_DOCS / "from-vllm-or-sglang.md").read_text().splitlines()
    cells = [line.split("|")[column] for line in lines if line.startswith("| ")]
    flags = {flag for cell in cells for flag in re.findall(r"`(--[a-z-]+)", cell)}
    assert len(flags) > 15 and flags - _OWN - KNOWN == set()


def test_what_is_named_exists() -> None:
    names = {*SETTINGS.values(), *(said.partition("=")[0] for said in SWITCHES.values())}
    for name in names:
        section, _, field = name.rpartition(".")
        assert field in type(getattr(Settings(), section) if section else Settings()).model_fields, name
    assert {*STRATEGIES.values()} <= set(OURS)
