"""Training data: the target's own answers and hidden states, the same bits in any run, and nothing lost."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.router.tokens import Tokens
from speculation.errors import ConfigurationError
from speculation.messages import GenerationRequest, Progress
from speculation.types import Features, Plan, SamplingParams
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model
from tests.trainings.data_runs import OPTIONS, TASKS, config_of, digests, make, make_model, write_prompts
from training import generate, shards
from training.data_folder import DataOptions, encode_prompts
from training.data_manifest import FILE, read_data_manifest
from training.generate import UNDER_WAY
from training.observed_target import _as_float16, load_target, plain_decoding
from training.own_prompts import end_of_turn
from training.prompt_files import read_prompts
from training.shards import Shards, read_shards
from training.tasks import tasks_of

# One process, since the model and the data are shared.
pytestmark = [pytest.mark.xdist_group("training data"), pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def made(model: Path, files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "whole"
    progress = asyncio.run(make(out, model, files))
    assert progress.done == progress.total == TASKS
    return out


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(made, tmp_path / "data"))


def test_sequences_are_the_engines_own_answers(made: Path, model: Path, files: list[Path]) -> None:
    """Each one alone, by a loop without anything else in its passes."""
    tokens = Tokens(str(model))
    tasks = tasks_of(encode_prompts(read_prompts(files), tokens), OPTIONS.samples, OPTIONS.seed)

    async def alone() -> list[list[int]]:
        target, worker = load_target(config_of(model))
        answers = []
        async with plain_decoding(target, worker, 1) as loop:
            for task in tasks:
                sampling = SamplingParams(temperature=task.temperature, seed=task.seed(OPTIONS.seed), max_tokens=24)
                plain = Plan(strategy="autoregressive")
                request = GenerationRequest(request_id="r", prompt=task.prompt.tokens, sampling=sampling, plan=plain)
                answers.append([t async for e in loop.generate(request) if isinstance(e, Progress) for t in e.token_ids])
        return answers

    found = read_shards(made)
    assert len(found) == TASKS == len(tasks)
    for sequence, task, answer in zip(found, tasks, asyncio.run(alone()), strict=True):
        assert tuple(sequence.tokens[: sequence.prompt_length]) == task.prompt.tokens
        assert sequence.tokens[sequence.prompt_length :].tolist() == answer
        assert (sequence.domain, sequence.temperature) == (task.prompt.domain, task.temperature)
    assert len({tuple(s.tokens.tolist()) for s in found}) > TASKS / 2
    assert {len(s.tokens) - s.prompt_length for s in found} > {24}, "some answers end by themselves"


def test_states_are_the_models(made: Path, model: Path) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(model)
    for sequence in read_shards(made):
        with torch.no_grad():
            output = reference(torch.from_numpy(np.array(sequence.tokens))[None].long(), output_hidden_states=True)
        # transformers gives the embeddings first, and the last state after the norm.
        right = torch.cat([output.hidden_states[1][0], output.hidden_states[2][0]], dim=-1)
        assert sequence.known.tolist() == [True] * (len(sequence.tokens) - 1) + [False]
        states = torch.from_numpy(np.array(sequence.states[:-1])).float()
        torch.testing.assert_close(states, right[:-1], rtol=2e-3, atol=2e-3)
        # The state at p gives the token at p + 1.
        after = states[sequence.prompt_length - 1 :, -64:] @ reference.get_output_embeddings().weight.T
        if sequence.temperature == 0:
            assert after.argmax(-1).tolist() == sequence.tokens[sequence.prompt_length :].tolist()


async def test_given_answers_are_read_with_the_targets_states(model: Path, files: list[Path], tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    texts = ["a good answer", "another one, which is so long that it has to be cut off somewhere in the middle of it"]
    lines = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}] for text in texts]
    lines[1][0] = {"role": "user", "content": "hello 0"}
    chats.write_text("\n".join(json.dumps({"messages": line}) for line in lines))
    options = replace(OPTIONS, samples=2)
    # Some stop behind the first shard.
    stopped = await make(tmp_path / "data", model, files, options, stop_at=60, given=[chats])
    assert stopped.done < stopped.total == 2 * 9 + 2
    await make(tmp_path / "data", model, files, options, given=[chats])
    manifest = read_data_manifest(tmp_path / "data")
    assert (manifest.domains, manifest.given) == (("math", "code", "chat", "chats"), ("chats",))
    tokens, reference = Tokens(str(model)), AutoModelForCausalLM.from_pretrained(model)
    found = {
        each.prompt_length + len(each.tokens): each for each in read_shards(tmp_path / "data") if each.domain == "chats"
    }
    assert len(found) == 2
    for sequence in found.values():
        answer = tuple(sequence.tokens[sequence.prompt_length :].tolist())
        whole = next(each for text in texts if (each := tokens.encode_answer(text))[:3] == answer[:3])
        ends = end_of_turn(tokens)
        assert answer == (*whole, *ends) if len(whole) < 24 else answer == whole[:24]
        with torch.no_grad():
            states = reference(torch.from_numpy(np.array(sequence.tokens))[None].long(), output_hidden_states=True)
        right = torch.cat([states.hidden_states[1][0], states.hidden_states[2][0]], dim=-1)[:-1]
        assert sequence.known.tolist() == [True] * len(right) + [False] and sequence.temperature == 1.0
        torch.testing.assert_close(torch.from_numpy(np.array(sequence.states[:-1])).float(), right, rtol=2e-3, atol=2e-3)
    # The same prompt is asked, too: of a file that is no longer given, it is another run's data.
    with refuses(ConfigurationError, field="--out", says="other prompts"):
        await make(tmp_path / "data", model, files, options)


@pytest.mark.parametrize(
    "stops", [(40, 70, 90), *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ((1,), (130,), (560,)))]
)
async def test_an_interrupted_run_gives_the_same_files(
    stops: tuple[int, ...], made: Path, model: Path, files: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "data"
    tokens = 0
    for stop in stops:
        progress = await make(out, model, files, stop_at=stop)
        tokens += progress.tokens
        assert progress.done < progress.total
    last = await make(out, model, files)
    assert digests(out) == digests(made)
    answers = sum(entry.answer_tokens for entry in read_data_manifest(out).shards)
    # Only the last token of each sequence under way is chosen again.
    again = tokens + last.tokens - answers
    assert again <= 2 * TASKS * len(stops)
    assert last.tokens < answers or stops == (1,)


async def test_more_sequences_can_be_asked_for(made: Path, model: Path, files: list[Path], tmp_path: Path) -> None:
    progress = await make(tmp_path / "data", model, files, replace(OPTIONS, sequences=7))
    assert progress.total == 7 == len(read_shards(tmp_path / "data"))
    await make(tmp_path / "data", model, files)
    assert digests(tmp_path / "data") == digests(made)


async def test_a_full_disk_loses_nothing(
    made: Path, model: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write_whole = tmp_path / "data", shards.write_whole

    def full(path: Path, content: bytes) -> None:
        if path.name == "shard-00002.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(path, content)

    monkeypatch.setattr(shards, "write_whole", full)
    with refuses(ConfigurationError, field="data"):
        await make(out, model, files)
    assert "shard-00002.safetensors" not in digests(out)
    assert 5 <= len(read_shards(out)) <= 10, "what lies before it is there"
    monkeypatch.undo()
    progress = await make(out, model, files)
    assert progress.tokens < sum(entry.answer_tokens for entry in read_data_manifest(out).shards) / 2
    assert digests(out) == digests(made)


def damage(data: Path, name: str = "shard-00001.safetensors", *, cut: bool = False) -> None:
    content = bytearray((data / name).read_bytes())
    content[-1] ^= 1
    (data / name).write_bytes(content[:-5] if cut else content)


@pytest.mark.parametrize("cut", [True, False])
async def test_a_damaged_shard_is_named_and_made_again(
    cut: bool, data: Path, made: Path, model: Path, files: list[Path]
) -> None:
    damage(data, cut=cut)
    with refuses(ConfigurationError, field="data/shard-00001.safetensors"):
        read_shards(data)
    said: list[str] = []
    await make(data, model, files, said=said.append)
    assert len(said) == 1 and "shard-00001.safetensors" in said[0]
    assert digests(data) == digests(made)


def test_shards_without_a_check_are_still_no_other_files(data: Path) -> None:
    (data / "shard-00000.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{}   ")
    with refuses(ConfigurationError, field="data/shard-00000.safetensors"):
        read_shards(data, verify=False)


def test_while_data_grow_an_index_stays(data: Path) -> None:
    manifest = read_data_manifest(data)
    without = manifest.model_copy(update={"shards": (*manifest.shards[:2], *manifest.shards[3:])})
    assert len(Shards(data, without, None)) == 10
    assert len(Shards(data, manifest, None)) == TASKS


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}'])
def test_a_damaged_manifest_is_refused(text: str, data: Path) -> None:
    (data / FILE).write_text(text)
    with refuses(ConfigurationError, field="data/manifest.json"):
        read_shards(data)


def test_no_data_are_refused(tmp_path: Path) -> None:
    with refuses(ConfigurationError, says="holds no training data"):
        read_shards(tmp_path)


async def test_data_of_another_target_are_refused(data: Path, files: list[Path], tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", initializer_range=0.2)
    before = digests(data)
    with refuses(ConfigurationError, field="--out", value="data"):
        await make(data, other, files)
    assert digests(data) == before


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"seed": 8}, ("--out", "data", "--seed 7, not 8")),
        ({"samples": 2}, ("--out", "data", "--samples 3, not 2")),
        ({"layers": (-1,)}, ("--out", "data", "--layers [0, -1]")),
    ],
)
async def test_data_with_other_options_are_refused(
    changed: dict[str, Any], refusal: tuple[object, ...], data: Path, model: Path, files: list[Path]
) -> None:
    with refuses(ConfigurationError, *refusal):
        await make(data, model, files, replace(OPTIONS, **changed))


async def test_other_prompts_and_other_folders_are_refused(
    data: Path, model: Path, files: list[Path], tmp_path: Path
) -> None:
    with refuses(ConfigurationError, field="--out", value="data"):
        await make(data, model, files[:1])
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.txt").touch()
    with refuses(ConfigurationError, field="--out", value="else"):
        await make(tmp_path / "else", model, files)


async def test_a_layer_that_does_not_exist_is_refused(model: Path, files: list[Path], tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="--layers", value=5, allowed="from -2 to 1: the model has 2 layers"):
        await make(tmp_path / "data", model, files, DataOptions(layers=(5,)))
    assert not (tmp_path / "data").exists()


def test_bfloat16_states_become_the_nearest_float16() -> None:
    numbers = torch.tensor([[0.1, -3.0], [1e30, -1e30]], dtype=torch.bfloat16)
    data = numbers.view(torch.int16).numpy().tobytes()
    found = _as_float16(Features(data=data, rows=2, width=2, dtype="bfloat16"))
    assert found.tolist() == numbers.float().clamp(-65504, 65504).half().tolist()


async def test_tokens_under_way_are_written_now_and_then(
    made: Path, model: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run that was killed leaves."""
    monkeypatch.setattr(generate, "_SAVE_EVERY_S", 0.01)
    monkeypatch.setattr(generate.DataRun, "_save", _saves_until(generate.DataRun._save, 3))
    out = tmp_path / "data"
    await make(out, model, files, stop_at=200)
    kept = json.loads((out / UNDER_WAY).read_text())
    assert 0 < sum(map(len, kept.values())) < 200
    await make(out, model, files)
    assert digests(out) == digests(made)


def _saves_until(save: Callable[[Any], None], most: int) -> Callable[[Any], None]:
    calls = []

    def limited(run: Any) -> None:
        calls.append(run)
        if len(calls) <= most or run is not calls[0]:
            save(run)

    return limited
