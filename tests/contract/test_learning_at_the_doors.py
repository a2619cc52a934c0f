"""A router that learns, behind every door: what answers say of it, the same tokens whatever it chooses, whom it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import outrider
from cli.main import app
from services.router.learning.contexts import Context
from services.router.learning.learning import Learning
from services.router.service import RouterService
from tests.contract.test_openai_calls import post
from tests.servers.http_service import HttpService, http_served

COPIED = "the quick brown fox jumps over the lazy dog, " * 12
ASKED: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 3, "allowed_token_ids": [40, 41, 42, 43]}
# An answer's time pays for its replay; on a busy machine that must not be left to chance.
ENOUGH_S = 1000.0
NAMED = {"speculation": {"strategy": "suffix"}}


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[HttpService]:
    with http_served(tiny_model, "router.learning=true", "verifier.budget=measured") as made:
        yield made


@pytest.fixture
def learning(service: HttpService) -> Iterator[Learning]:
    """Of the router, with time to spare and nothing learnt."""
    router: Any = service.pipeline.router
    while not isinstance(router, RouterService):
        router = router._router
    found = router._learning
    assert found is not None
    found.counts.everybody.clear()
    found.counts.forget("")
    found.spare.earn(ENOUGH_S)
    yield found
    service.run(found.spare.settle())


def ask(service: HttpService, **body: Any) -> tuple[str, dict[str, Any]]:
    """The answer's text, and how it was drafted."""
    said = post(service, "/v1/completions", **({"prompt": COPIED, "temperature": 0, **ASKED} | body))
    return said["choices"][0]["text"], said["metrics"]["speculative_decoding"]


def prefer(learning: Learning, strategy: str) -> None:
    """Have answers of all kinds been much faster with a strategy."""
    for length in ("0", "128", "512"):
        for repeated in range(4):
            for how in ("greedy", "sampled"):
                context = Context("", f"{length}.{repeated}.{how}")
                for _ in range(20):
                    learning.counts.learn(context, {strategy: (50.0, 100.0)})


def test_an_answer_is_replayed_when_it_is_done(service: HttpService, learning: Learning) -> None:
    _, how = ask(service)
    assert how["strategy"] == "auto" and how["learnt"] == "no strategy is surely faster for such prompts"
    service.run(learning.spare.settle())
    known = learning.counts.everybody["any"]
    assert set(known) == {"auto", "autoregressive", "prompt_lookup", "suffix", "recycling"}
    # In plain steps: as many as plain decoding takes passes behind the prompt's.
    assert known["autoregressive"].part == pytest.approx(59)
    assert all(cost.part > 0 and cost.whole > 0 for cost in known.values())


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    ("strategy", "temperature"), [("prompt_lookup", 0.0), ("suffix", 0.9), ("recycling", 0.9), ("autoregressive", 0.0)]
)
def test_what_is_chosen_changes_no_token(
    service: HttpService, learning: Learning, strategy: str, temperature: float
) -> None:
    plain, named = ask(service, temperature=temperature, speculation={"strategy": "autoregressive"})
    assert "learnt" not in named
    prefer(learning, strategy)
    text, how = ask(service, temperature=temperature)
    assert (text, how["strategy"]) == (plain, strategy) and "less time than auto" in how["learnt"]
    with outrider.Client(service.grpc) as client:
        told = client.generate(COPIED, temperature=temperature, **ASKED)
    assert (told.text, told.speculative_decoding.strategy) == (plain, strategy)
    assert told.speculative_decoding.learnt == how["learnt"]


@pytest.mark.parametrize(
    "body",
    [
        {"privacy": "strict", "max_tokens": 16},
        {"speculation": {"acceptance": "rejection"}},
        {"speculation": {"strategy": "suffix"}},
        {"structured_outputs": {"regex": "[a-z]{20}"}, "ignore_eos": False, "allowed_token_ids": None},
    ],
)
def test_who_is_left_alone_is_not_replayed_either(service: HttpService, learning: Learning, body: dict[str, Any]) -> None:
    prefer(learning, "prompt_lookup")
    before = learning.spare.spent_s
    _, how = ask(service, **body)
    service.run(learning.spare.settle())
    assert how["strategy"] != "prompt_lookup" and "learnt" not in how and learning.spare.spent_s == before


def test_a_tenant_is_forgotten(service: HttpService, learning: Learning) -> None:
    prefer(learning, "suffix")
    service.run(service.pipeline.router.forget(""))
    assert not learning.counts.sheet("") and learning.counts.everybody


@pytest.mark.parametrize(("body", "said_by"), [({}, "router.learning, while serving"), (NAMED, "the request")])
def test_a_plan_says_that_the_strategy_is_learnt(
    tiny_model: Path, tmp_path: Path, body: dict[str, Any], said_by: str
) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"prompt": "fox", **body}))
    command = ["plan", "--model", str(tiny_model), "--set", "router.learning=on", "--explain", str(request), "--json"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["said_by"]["strategy"].startswith(said_by)
