"""The command line as a user types it, on a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.command_line import SMALL, outrider
from tests.e2e.conftest import Command
from tests.running.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SERVE = [str(Path(sys.executable).parent / "outrider"), "serve", "--in-process", "--model"]


def test_generate_in_process_prints_the_promised_object(outrider_here: Command, tiny_model: Path) -> None:
    here = ["--in-process", "--model", str(tiny_model), *SMALL]
    results = []
    for strategy in ("autoregressive", "prompt_lookup"):
        done = outrider_here(
            "generate", "the quick brown", *here, "--strategy", strategy, "--max-tokens", "30",
            "--temperature", "0.8", "--seed", "7", "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    plain, drafted = results
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["text"] == drafted["text"]
    for result in results:
        assert len(result["token_ids"]) == result["usage"]["completion_tokens"]
        assert result["prompt_token_ids"]
        assert result["finish_reason"] in ("stop", "length")
        assert set(result["metrics"]["speculative_decoding"]) == {
            "strategy",
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "num_spec_steps",
            "num_spec_tokens",
            "num_draft_tokens",
            "num_accepted_draft_tokens",
            "acceptance_histogram",
            "accepted_by_source",
            "switches",
            "seconds_saved",
            "rule",
            "learnt",
        }
        assert set(result["timing"]) == {"queue_s", "time_to_first_token_s", "total_s", "tokens_per_second"}
    assert drafted["metrics"]["speculative_decoding"]["strategy"] == "prompt_lookup"


@pytest.mark.exhaustive
def test_generate_says_how_much_is_drafted(outrider_here: Command, tiny_model: Path) -> None:
    """Drafts that may not be waited for come too late for each step by the paper's rule, and the answer says so."""
    here = ["--in-process", "--model", str(tiny_model), *SMALL, "--set", "verifier.named_deadline_s=0"]
    notes = {}
    for effort in ("paper", "measured"):
        done = outrider_here(
            "generate",
            "the quick brown",
            *here,
            "--strategy",
            "prompt_lookup",
            "--effort",
            effort,
            "--max-tokens",
            "8",
            "--json",
        )
        assert done.returncode == 0, done.stderr
        notes[effort] = json.loads(done.stdout)["metrics"]["speculative_decoding"]["switches"]
    assert notes["measured"] == []
    assert "without the draft of prompt_lookup: it did not come in time (verifier.named_deadline_s)" in notes["paper"][0]
    for command in (["generate", "a", *here], ["bench", "--model", str(tiny_model)]):
        refused = outrider_here(*command, "--effort", "much")
        assert refused.returncode == 2 and "effort" in refused.stderr and "paper" in refused.stderr


@pytest.mark.exhaustive
def test_serve_then_generate_then_stop(tiny_model: Path) -> None:
    server = subprocess.Popen([*SERVE, str(tiny_model), "--port", "0", *SMALL], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        address = line.split(" at ")[1].split()[0]
        done = outrider("chat", "hello", "--address", address, "--max-tokens", "8")
        assert done.returncode == 0, done.stderr
        assert "tok/s" in done.stderr and "guessed by" not in done.stderr
        coloured = outrider("chat", "hello", "--address", address, "--max-tokens", "8", "--sources")
        assert coloured.stdout == done.stdout
        assert "guessed by: " in coloured.stderr and "target" in coloured.stderr
        listed = outrider("models", "--address", address)
        assert "prompt_lookup" in listed.stdout
        assert "requests that leave it open get" not in listed.stdout
        listed = outrider("models", "-v", "--address", address)
        assert "requests that leave it open get what holds for all models" in " ".join(listed.stdout.split())
        refused = outrider("generate", "x", "--address", address, "--strategy", "[/b]")
        assert refused.returncode == 2
        assert "speculation.strategy is [/b]: must be one of anpd, auto, autoregressive, blend" in refused.stderr
    finally:
        server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "x", "--address", "127.0.0.1:1"), "no Outrider server answers at 127.0.0.1:1,"),
        (("generate", "x", "--in-process", "--address", "127.0.0.1:1"), "exclude each other"),
        (("plan", "--set", "verifier.dtyp=x"), "unknown setting verifier.dtyp: did you mean verifier.dtype? Known here: "),
        (("plan", "--config", "/nonexistent.yaml"), "cannot read the configuration"),
        (("serve", "--in-process", "--model", "/nonexistent.gguf"), "no such file"),
        (("serve", "--host", "0.0.0.0", "--in-process", "--model", "TINY"), "api_key_hashes"),
    ],
)
def test_mistakes_get_one_helpful_line(
    outrider_here: Command, tiny_model: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = outrider_here(*(str(tiny_model) if argument == "TINY" else argument for argument in arguments))
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_and_hash_key() -> None:
    done = outrider("plan")
    assert done.returncode == 0
    for word in ("router", "drafter", "verifier", "127.0.0.1:50051", "no API keys"):
        assert word in done.stdout
    assert len(outrider("hash-key", stdin="a key of enough letters\n").stdout.strip()) == 64
    assert "at least 16" in outrider("hash-key", stdin="short\n").stderr


@pytest.mark.exhaustive
def test_ctrl_c_while_the_model_is_loaded_ends_at_once(tiny_model: Path) -> None:
    for number, times in ((signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)):
        command = [*SERVE, str(tiny_model), "--port", "0", *SMALL]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        assert "Loading the model" in server.stderr.readline()
        for _ in range(times):
            server.send_signal(number)
            time.sleep(0.1)
        _, rest = server.communicate(timeout=PATIENCE_S)
        # A second one may come when Python has put its handlers away already.
        assert server.returncode in (130, -number)[:times]
        assert "Traceback" not in rest


@pytest.mark.exhaustive
def test_a_second_signal_ends_it_at_once_and_in_one_line(tiny_model: Path) -> None:
    # It would wait for ten minutes before it refuses calls.
    flags = ["--set", "server.port=0", "--set", "server.drain_delay_s=600", "--set", "verifier.budget=fixed"]
    command = [*SERVE, str(tiny_model), *flags, *SMALL]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stderr is not None
    assert " at 127.0.0.1:" in server.stdout.readline()
    server.send_signal(signal.SIGTERM)
    while "Stopping" not in (line := server.stderr.readline()):
        assert line
    server.send_signal(signal.SIGTERM)
    _, rest = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 128 + signal.SIGTERM
    assert rest.splitlines() == ["Stopped at once, by a second signal; answers under way were cut off"]


def test_the_plan_counts_all_replicas(outrider_here: Command) -> None:
    flags = ("router.replicas=2", "verifier.autoscaling={min_replicas: 2, max_replicas: 4}", "server.drain_delay_s=7")
    done = outrider_here("plan", *(part for flag in flags for part in ("--set", flag)))
    text = " ".join(done.stdout.split())
    for words in (
        "2 to 4",
        "on Ray: 5 processes with 2.75 CPUs and 0 GPUs, at most 7 processes with 4.75 CPUs",
        "routers: those of one machine share port 50051",
        "refuses calls after 7 s",
        "between components: a token, no TLS",
    ):
        assert words in text
