"""Whole targets whose states Triton's kernels step, through its interpreter: the bits of plain decoding, in any packing.

Faults are planted where a target meets the kernels, and must be seen here and at every start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

pytest.importorskip("triton")
from services.verifier.attention.on_gpu import GpuAttention
from services.verifier.config import TargetConfig
from services.verifier.kernels import gpu_choice
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.triton.row_steps import TritonSteps
from services.verifier.kernels.whole_vectors import fill_vectors
from services.verifier.model.means import TargetMeans
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from services.verifier.recurrence import walks
from services.verifier.recurrence.state_pool import StatePool
from services.verifier.recurrence.walks import HERE, Walked, WalkStep
from speculation.errors import ConfigurationError
from tests.kernels.triton_interpreter import hopper
from tests.lossless.hybrids import chain, close_all, make_hybrid, plainly, random_text
from tests.running.refusals import refuses

pytestmark = pytest.mark.exhaustive

LENGTH = 26
# Convolutions, means of values and a delta rule; the interpreter takes minutes for the sums over keys of the others, which
# ``test_triton_steps`` tries at small sizes.
KINDS = ["lfm2", "rwkv", "qwen3_next"]
STEPS = TargetMeans(steps=lambda _: (TritonSteps(), ""))


def config_of(folder: Path, **settings: object) -> TargetConfig:
    given = {"kv_cache_tokens": 512, "max_model_len": 192, "threads": 1, "pass_requests": 4, **settings}
    return TargetConfig(model_path=str(folder), **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(request.param, tmp_path_factory.mktemp("stepped") / request.param)


@pytest.fixture(scope="module")
def target(folder: Path) -> TransformersTarget:
    made = TransformersTarget(config_of(folder), means=STEPS)
    assert made.exact
    return made


@pytest.fixture
def opened(target: TransformersTarget) -> Iterator[TransformersTarget]:
    """Nothing is open before a test, nor after it, and nothing is shared."""
    yield target
    close_all(target)
    target.blocks.forget_all()


@pytest.fixture(scope="module")
def text(target: TransformersTarget) -> list[int]:
    return random_text(target, LENGTH)


@pytest.fixture(scope="module")
def alone(target: TransformersTarget, text: list[int]) -> torch.Tensor:
    return plainly(target, text)


def tree(text: list[int], at: int) -> tuple[Rows, list[int]]:
    """The token at ``at`` and a tree of its three successors among wrong siblings and cousins; the rows of these four."""
    nodes, parents = (text[at + 1], 5, 6, text[at + 2], 7, 8, text[at + 3]), (-1, -1, 0, 0, 1, 3, 3)
    return Rows(request_id="tree", context=at, tokens=(text[at], *nodes), parents=parents, logits=8), [0, 1, 4, 7]


def same_in_trees(target: TransformersTarget, text: list[int], alone: torch.Tensor) -> bool:
    """Whether chunks, and trees of which some nodes are kept, have the bits of plain decoding beside each other."""
    target.open("tree", LENGTH + 16)
    target.open("beside", LENGTH)
    same = torch.equal(target.forward([chain("tree", 0, text[:5])])[0], alone[:5])
    at = 5
    for passes, kept in enumerate((4, 1, 3, 2, 4)):
        rows, path = tree(text, at)
        beside, made = target.forward([chain("beside", 2 * passes, text[2 * passes : 2 * passes + 2]), rows])
        same &= torch.equal(made[path], alone[at : at + 4])
        same &= torch.equal(beside, alone[2 * passes : 2 * passes + 2])
        target.keep("tree", at, path[:kept])
        at += kept
    same &= torch.equal(target.forward([chain("tree", at, text[at:])])[0], alone[at:])
    target.close("tree")
    target.close("beside")
    return same


def test_chunks_and_trees(opened: TransformersTarget, text: list[int], alone: torch.Tensor) -> None:
    assert same_in_trees(opened, text, alone)


def test_they_compute_what_the_cpu_does(folder: Path, text: list[int], alone: torch.Tensor) -> None:
    """Up to rounding, since sums over keys run in another order."""
    plain = TransformersTarget(config_of(folder))
    plain.open("text", LENGTH)
    made = plain.forward([chain("text", 0, text)])[0]
    torch.testing.assert_close(alone, made, atol=2e-3, rtol=2e-3)


def _one_step_too_many(pool: StatePool, owner: str, context: int, rows: list[int]) -> None:
    _keep(pool, owner, context, rows)
    held = pool._held[owner]
    if held.accepted:
        held.accepted = [*held.accepted, held.accepted[-1]]
        held.length -= 1


def _sibling(request: Walked, first_place: int) -> tuple[list[WalkStep], int]:
    """A row steps from the row before it, whosever child it is."""
    steps, used = _steps_of(request, first_place)
    return [steps[0], *(step._replace(source=HERE) for step in steps[1:])], used


_keep, _steps_of = StatePool.keep, walks.steps_of


@pytest.fixture(params=["one step too many", "a sibling's state"])
def fault(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one step too many":
        monkeypatch.setattr(StatePool, "keep", _one_step_too_many)
    elif folder.name == "lfm2":
        pytest.skip("it has convolutions alone, which are not walked")
    else:
        monkeypatch.setattr(walks, "steps_of", _sibling)


@pytest.mark.usefixtures("fault")
def test_planted_faults_are_seen(opened: TransformersTarget, text: list[int], alone: torch.Tensor) -> None:
    assert not same_in_trees(opened, text, alone)


@pytest.mark.usefixtures("fault")
def test_planted_faults_are_refused_at_every_start(folder: Path) -> None:
    with refuses(ConfigurationError, says="it computes something else than its own eager attention"):
        TransformersTarget(config_of(folder), means=STEPS)


def test_a_prefix_goes_on_from_a_state_kept_in_mid_pass(tmp_path: Path) -> None:
    """One pass brings the state past the border at which it is kept."""
    folder = make_hybrid("qwen3_next", tmp_path / "qwen3_next")
    target = TransformersTarget(config_of(folder, mamba_block_size=64), means=STEPS)
    tokens = [at * 7 % (target.vocab_size - 1) + 1 for at in range(80)]
    prefix = Prefix(tokens=tuple(tokens), tenant="a")
    assert target.open("first", 90, prefix)
    whole = target.forward([chain("first", 0, tokens)])[0]
    target.keep("first", 0, range(80))
    target.close("first")
    assert target.open("second", 90, prefix)
    assert target.computed("second") == 64
    assert torch.equal(target.forward([chain("second", 64, tokens[64:])])[0], whole[64:])


def test_all_of_a_pass_as_on_a_gpu(tmp_path: Path) -> None:
    """Attention, linear layers and norms by Triton's kernels, too. Of the fastest kind: the interpreter takes a minute."""
    folder = make_hybrid("lfm2", tmp_path / "lfm2")

    def row_kernels(model: Any, config: TargetConfig) -> Choice:
        fill_vectors()
        gpu_choice.put(model, "triton", torch.device(config.device), make=gpu_choice.maker_of("triton", "bfloat16"))
        return Choice(linears="triton")

    means = TargetMeans(attention=GpuAttention(refusal=lambda *_: ""), pack=row_kernels, steps=STEPS.steps)
    with hopper():
        target = TransformersTarget(config_of(folder, max_model_len=128), means=means)
        assert target.exact
        text = [at * 37 % target.vocab_size for at in range(9)]
        target.open("alone", 9)
        alone = torch.cat([target.forward([chain("alone", at, text[at : at + 1])])[0] for at in range(9)])
        target.open("tree", 24)
        assert torch.equal(target.forward([chain("tree", 0, text[:5])])[0], alone[:5])
        rows, path = tree(text, 5)
        assert torch.equal(target.forward([rows])[0][path], alone[5:])


def test_a_device_that_steps_no_states_is_refused(tmp_path: Path) -> None:
    folder = make_hybrid("lfm2", tmp_path / "lfm2")
    means = TargetMeans(steps=lambda _: (None, "triton is not installed"))
    with refuses(ConfigurationError, says="layers with a state"):
        TransformersTarget(config_of(folder), means=means)

    class Small(TritonSteps):
        @override
        def refusal(self, shape: tuple[int, ...]) -> str:
            return f"its states are {shape}"

    with refuses(ConfigurationError, says="its states are"):
        TransformersTarget(config_of(folder), means=TargetMeans(steps=lambda _: (Small(), "")))
