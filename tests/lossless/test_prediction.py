"""What a user predicts of an answer speeds it up where it is right, and changes no token, right or wrong."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.api.messages import ClientRequest, RequestedSampling
from services.drafter.merging.blend import BlendSession
from services.drafter.merging.calibrator import Calibrator
from services.drafter.sources.prediction import PRIOR, PredictedAnswer
from services.router.plans import make_plan
from services.router.strategies import StrategyConfig
from speculation.errors import InvalidArgument
from speculation.messages import OpenSession, StepReport
from speculation.types import Plan
from tests.engine.fakes import PLAIN, collect, request
from tests.lossless.test_strategies import PROMPTS, verifier
from tests.running.refusals import refuses

PREDICTED = Plan(strategy="blend", sources=("prediction", "suffix", "recycling"), max_nodes=16, observe_top_k=6)


def edited(answer: list[int], seed: int) -> tuple[int, ...]:
    """An answer with a token replaced, one left out, two put in, and its end cut off."""
    source = random.Random(seed)
    other = list(answer)
    other[10] = source.randrange(200)
    del other[20]
    other[30:30] = [source.randrange(200), source.randrange(200)]
    return tuple(other[:50])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}], ids=str)
async def test_predictions_change_no_token(tiny_model: Path, sampling: dict[str, Any]) -> None:
    async with verifier(tiny_model, "real", "in_process", "fixed") as running:

        async def ask(name: str, prompt: list[int], plan: Plan, prediction: tuple[int, ...]) -> tuple[list[int], int, int]:
            wanted = replace(request(name, prompt, plan, max_tokens=60, ignore_eos=True, **sampling), prediction=prediction)
            tokens, _, steps = await collect(running.loop, wanted)
            sources = [source for step in steps for source in step.accepted_sources]
            return tokens, sources.count("prediction"), len(steps)

        used: Counter[str] = Counter()
        for number, prompt in enumerate(PROMPTS[:3]):
            plain, _, _ = await ask(f"plain{number}", prompt, PLAIN, ())
            cases = {
                "right": tuple(plain),
                "edited": edited(plain, number),
                "wrong": tuple(random.Random(number).randrange(250) for _ in range(60)),
                "short": tuple(plain[:3]),
            }
            for name, prediction in cases.items():
                told, accepted, steps = await ask(f"{name}{number}", prompt, PREDICTED, prediction)
                assert told == plain, (number, name)
                # How many depends on which drafts come in time.
                used[name] += accepted
                assert steps + accepted <= len(told)
        assert used["right"] > 0 and used["edited"] > 0


def session(prediction: list[int], answer: list[int] | None = None) -> BlendSession:
    opened = PredictedAnswer().open(
        OpenSession(
            session_id="s",
            tokens=(1, *(answer or [])),
            prompt_length=1,
            sources=(),
            max_nodes=8,
            prediction=tuple(prediction),
        )
    )
    return BlendSession({"prediction": opened}, Calibrator(PRIOR))


def said(*tokens: int) -> StepReport:
    return StepReport(session_id="s", committed=tokens, length=0, prefix_hash=0, accepted_path=(), max_nodes=8)


def test_the_answer_is_followed_and_found_again() -> None:
    prediction = list(range(10, 60))
    followed = session(prediction)
    assert followed.draft(5).tokens == (10, 11, 12, 13, 14)
    followed.observe(said(10, 11))
    assert followed.draft(3).tokens == (12, 13, 14)
    # One token is another one.
    followed.observe(said(99))
    assert followed.draft(3).tokens == (13, 14, 15)
    # Much is left out: two tokens of it are found.
    followed.observe(said(40, 41))
    assert followed.draft(3).tokens == (42, 43, 44)
    # Nothing follows the end, and nothing an empty prediction.
    followed.observe(said(58, 59))
    assert followed.draft(3).tokens == ()
    assert session([]).draft(4).tokens == ()
    # A session that begins late finds its place.
    assert session(prediction, [10, 11, 12]).draft(2).tokens == (13, 14)


def test_where_a_text_repeats_itself_the_nearest_place_is_taken() -> None:
    again = session([1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 1, 2, 3, 4, 70])
    again.observe(said(1, 2, 3, 4, 50, 9, 1, 2, 3, 4))
    assert again.draft(1).tokens == (60,)


def test_long_predictions_are_read_a_piece_at_a_time() -> None:
    prediction = [number % 7919 for number in range(5000)]
    opened = PredictedAnswer().open(
        OpenSession(session_id="s", tokens=(1,), prompt_length=1, sources=(), max_nodes=8, prediction=tuple(prediction))
    )
    opened.observe(said(4500, 4501))
    assert next(opened.candidates(opened.start() or (0, 0, False)))[0] != 4502
    while opened.catch_up():
        pass
    opened.observe(said(4600, 4601))
    assert next(opened.candidates(opened.start() or (0, 0, False)))[0] == 4602


@pytest.mark.parametrize(("strategy", "prediction", "used"), [("auto", "text", 1), ("blend", "text", 1), ("blend", "", 0)])
def test_who_uses_a_prediction(strategy: str, prediction: str, used: int) -> None:
    asked = ClientRequest(input="x", sampling=RequestedSampling(), strategy=strategy, prediction=prediction)
    sources = make_plan(asked, StrategyConfig()).sources
    assert sources.count("prediction") == used and (not used or sources[0] == "prediction")


@pytest.mark.parametrize(("strategy", "nodes"), [("autoregressive", None), ("suffix", None), ("blend", 0)])
def test_a_prediction_that_nothing_would_be_drafted_from_is_refused(strategy: str, nodes: int | None) -> None:
    asked = ClientRequest(
        input="x", sampling=RequestedSampling(), strategy=strategy, prediction="text", num_speculative_tokens=nodes
    )
    with refuses(InvalidArgument, "prediction", "4 characters", "0" if nodes == 0 else strategy, allowed="unset"):
        make_plan(asked, StrategyConfig())
