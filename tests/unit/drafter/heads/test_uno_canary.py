"""The canary for Uno, in the target's own passes: a good adapter serves, each planted fault is refused, and nothing is left."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cli.canary_command import canary
from cluster.build import in_process
from cluster.models.drafters import noise_trial
from cluster.models.target import ResolvedModel
from services.api.messages import ChatMessage
from services.drafter.heads.canary.noise import NoiseTrial
from services.drafter.heads.canary.texts import TEXTS, CanaryText, read_texts, record_texts, save_texts
from services.drafter.heads.canary.verdict import CanaryResult
from services.drafter.heads.files.target_shape import read_target_shape
from services.router.tokens import Tokens
from services.verifier.checks.noise_guesses import guess_behind_noise
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_uno import Formulas, computed, last_pass
from tests.running.refusals import refuses
from tests.tiny_models.draft_folders import settings_of
from tests.tiny_models.learnt_noise import ROWS, learn_noise
from tests.tiny_models.lora import WEIGHTS, make_adapter
from tests.tiny_models.tiny import make_tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.xdist_group("uno"),
]

# The mask token that the adapters' files name; noise is drawn below it.
MASK = 3
NOISE = range(1, MASK)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def text() -> CanaryText:
    """Random tokens, so that nothing but the adapter tells what comes next."""
    return CanaryText(tokens=torch.randint(4, 300, (80,), generator=torch.Generator().manual_seed(3)), answer=10, states={})


def with_files(folder: Path, text: CanaryText) -> Path:
    """The adapter with the canary's text beside it, and its mask token."""
    save_texts([text], folder / TEXTS)
    (folder / "config.json").write_text(json.dumps({"mask_token_id": MASK}))
    return folder


@pytest.fixture(scope="module")
def good(target: Path, text: CanaryText) -> Path:
    """An adapter that has learnt the text by heart."""
    return with_files(learn_noise(target, target.parent / "good", text.tokens.tolist(), NOISE), text)


@contextmanager
def passes(target: Path, adapter: Path) -> Iterator[TransformersTarget]:
    config = TargetConfig(model_path=str(target), kv_cache_tokens=2048, max_model_len=512, threads=1, draft_adapter=adapter)
    yield TransformersTarget(config)


def tried(adapter: Path, target: Path) -> CanaryResult | None:
    with passes(target, adapter) as running:
        return NoiseTrial(adapter, target)(partial(guess_behind_noise, running))


def test_guesses_are_what_the_formulas_say(target: Path, good: Path, text: CanaryText) -> None:
    tokens, start = text.tokens.tolist()[:45], 20
    noise = [(1 + at % 2, 40 + at) for at in range(len(tokens) - start)]
    with passes(target, good) as running:
        found = {adapted: guess_behind_noise(running, tokens, start, noise, adapted) for adapted in (True, False)}
    formulas = Formulas(target, good)
    for place, own in enumerate(noise):
        seen = [*tokens[: start + place + 1], *own]
        sees = torch.ones(len(seen), len(seen)).tril().bool()
        for adapted, guessed in found.items():
            marks = [False] * (len(seen) - ROWS) + [adapted] * ROWS
            said = formulas(seen, range(len(seen)), marks, sees)[-ROWS:]
            assert guessed[place].tolist() == said.argmax(-1).tolist()


def test_a_good_adapter_passes_and_nothing_is_left(target: Path, good: Path) -> None:
    found = tried(good, target)
    assert found is not None and found.guesses == 70
    assert found.first > 0.9 and found.second > 0.9 and found.likely_fault is None
    with passes(target, good) as running:
        expected, free = computed(running, last_pass()), running.blocks.available
        NoiseTrial(good, target)(partial(guess_behind_noise, running))
        assert running.blocks.available == free and torch.equal(computed(running, last_pass()), expected)


def without_texts(adapter: Path, folder: Path) -> Path:
    copy = Path(shutil.copytree(adapter, folder))
    shutil.rmtree(copy / TEXTS.parent)
    return copy


def test_without_texts_it_serves_untried(target: Path, good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert tried(without_texts(good, tmp_path / "copy"), target) is None
    assert "without a canary's texts" in caplog.text and "outrider train canary" in caplog.text


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"shift": -1}, "comes one token before"),
        ({"further": -1}, "comes one token further on"),
        ({"shift": 1}, "comes one token further on"),
        ({"further": 1}, "comes one token before"),
    ],
    ids=str,
)
def test_rows_at_another_position_are_named(
    target: Path, text: CanaryText, tmp_path: Path, fault: Mapping[str, int], said: str
) -> None:
    adapter = learn_noise(target, tmp_path / "adapter", text.tokens.tolist(), NOISE, **fault)
    with refuses(ConfigurationError, says=f"its rows, or their labels, are shifted by one: what it guesses {said}"):
        tried(with_files(adapter, text), target)


def test_an_adapter_for_mask_tokens_is_named(target: Path, text: CanaryText, tmp_path: Path) -> None:
    adapter = learn_noise(target, tmp_path / "adapter", text.tokens.tolist(), range(MASK, MASK + 1))
    with refuses(ConfigurationError, says=f"its rows must hold the mask token, {MASK}, and not uniform noise"):
        tried(with_files(adapter, text), target)


def swapped(adapter: Path, target: Path) -> Path:
    """Its layers are counted the other way."""
    tensors = load_file(adapter / WEIGHTS)
    others = {"layers.0": "layers.1", "layers.1": "layers.0"}

    def moved(name: str) -> str:
        before, layer, behind = name.partition("layers.0" if "layers.0" in name else "layers.1")
        return f"{before}{others[layer]}{behind}"

    save_file({moved(name): each for name, each in tensors.items()}, adapter / WEIGHTS)
    return target


def other_rope(adapter: Path, target: Path) -> Path:
    folder = Path(shutil.copytree(target, adapter.parent / "target"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 3.0
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def other_target(adapter: Path, target: Path) -> Path:
    """One of the same shapes and tokenizer."""
    folder = Path(shutil.copytree(target, adapter.parent / "target"))
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target)).save_pretrained(folder)
    return folder


def other_noise(adapter: Path, target: Path) -> Path:
    """Noise of the whole vocabulary."""
    (adapter / "config.json").unlink()
    return target


@pytest.mark.parametrize("plant", [swapped, other_rope, other_target, other_noise])
def test_planted_faults_are_refused(target: Path, good: Path, tmp_path: Path, plant: Callable[[Path, Path], Path]) -> None:
    adapter = Path(shutil.copytree(good, tmp_path / "adapter"))
    served = plant(adapter, target)
    with refuses(ConfigurationError, says="without it the target guesses as much"):
        tried(adapter, served)


def test_a_half_learnt_one_is_doubted(target: Path, good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Noise of more tokens than it has learnt from."""
    adapter = Path(shutil.copytree(good, tmp_path / "adapter"))
    (adapter / "config.json").write_text(json.dumps({"mask_token_id": 12}))
    with caplog.at_level(logging.WARNING):
        found = tried(adapter, target)
    assert found is not None and 0.05 < found.first < 0.3 and "helps little" in caplog.text


def test_texts_that_are_too_short(target: Path, good: Path, text: CanaryText) -> None:
    short = CanaryText(tokens=text.tokens[:60], answer=10, states={})
    with passes(target, good) as running, refuses(ConfigurationError, field="the canary's texts"):
        shape, guess = read_target_shape(target), partial(guess_behind_noise, running)
        NoiseTrial(good, target).check(guess, [short], shape, "ADAPTER")


def test_texts_that_the_cache_has_no_room_for(target: Path, good: Path) -> None:
    with passes(target, good) as running, refuses(ConfigurationError, says="in the KV cache"):
        guess_behind_noise(running, [1] * 3000, 2990, [(1, 2)] * 9, True)


async def test_a_service_with_a_useless_one_does_not_start(target: Path, text: CanaryText, tmp_path: Path) -> None:
    adapter = with_files(make_adapter(tmp_path / "adapter", target, seed=4), text)
    settings = settings_of(target, adapter, more=("verifier.kv_cache_tokens=2048", "verifier.threads=1"))
    model = ResolvedModel(name="tiny", path=target)
    assert noise_trial(settings, model) == NoiseTrial(adapter, target)
    assert noise_trial(settings_of(target), model) is None
    with refuses(ConfigurationError, says="which must be 5% at least"):
        async with in_process(settings, model):
            pass


def test_the_command_writes_texts_of_what_passes(target: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"prompt": "fox"}))
    encoded = Tokens(str(target)).encode_chat((ChatMessage(role="user", content="fox"),))
    (own,) = record_texts(AutoModelForCausalLM.from_pretrained(target), [encoded], (), 72)
    adapter = learn_noise(target, tmp_path / "good", own.tokens.tolist(), NOISE)
    (adapter / "config.json").write_text(json.dumps({"mask_token_id": MASK}))
    canary(adapter, str(target), asked, 72)
    assert read_texts(adapter / TEXTS)[0].tokens.tolist() == own.tokens.tolist()
