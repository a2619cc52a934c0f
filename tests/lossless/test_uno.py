"""Rows of noise: what they are by the formulas, and that nothing else sees them or their adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.verifier.config import TargetConfig
from services.verifier.model import fused_layers
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from speculation.errors import ConfigurationError
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.hybrids import make_hybrid
from tests.running.refusals import refuses
from tests.tiny_models.lora import WEIGHTS, make_adapter
from tests.tiny_models.tiny import make_tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.xdist_group("uno"),
]

TEXT = (5, 6, 7, 8, 9, 40, 41, 42, 17, 100, 33)
NOISE = (200, 13, 77, 150)
# Drafted nodes beside the noise, behind the same row.
NODES, BEHIND = (60, 61, 62), (-1, 0, -1)


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("uno") / "adapter", tiny_model, seed=8, size=0.2)


def config_of(model: Path, **fields: Any) -> TargetConfig:
    return TargetConfig(model_path=str(model), kv_cache_tokens=2048, max_model_len=512, threads=1, **fields)


@pytest.fixture(scope="module", params=["whole layers", "modules"])
def targets(
    request: pytest.FixtureRequest, tiny_model: Path, adapter: Path, target_layout: str
) -> Iterator[tuple[TransformersTarget, TransformersTarget]]:
    """The target that drafts, and the same without an adapter."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "modules":
            patch.setattr(fused_layers, "fuse", lambda *_: (0, "of the test"))
        yield TransformersTarget(config_of(tiny_model, draft_adapter=adapter)), TransformersTarget(config_of(tiny_model))


def last_pass(request_id: str = "r", *, noise: bool = True) -> Rows:
    """A pass over the last token of the text, drafted nodes behind it, and noise behind it."""
    tokens, parents, at = [*NODES], [*BEHIND], len(NODES)
    if noise:
        tokens += NOISE
        parents += [-1, *range(at, at + len(NOISE) - 1)]
    return Rows(
        request_id=request_id,
        context=len(TEXT) - 1,
        tokens=(TEXT[-1], *tokens),
        parents=tuple(parents),
        logits=1 + len(tokens),
        noise=tuple(1 + at + row for row in range(len(NOISE))) if noise else (),
    )


def begun(target: TransformersTarget, request_id: str = "r", adapter: str = "") -> None:
    """Let the target hold all of the text but its last token."""
    assert target.open(request_id, len(TEXT) + 40, Prefix(tokens=TEXT, adapter=adapter))
    target.forward([Rows(request_id=request_id, context=0, tokens=TEXT[:-1], logits=1)])
    target.keep(request_id, 0, range(len(TEXT) - 1))


def computed(target: TransformersTarget, rows: Rows, adapter: str = "") -> torch.Tensor:
    begun(target, rows.request_id, adapter)
    (found,) = target.forward([rows])
    target.close(rows.request_id)
    return found


class Formulas:
    """Llama's forward pass, from its formulas, over one row for each of the tokens."""

    def __init__(self, model: Path, adapter: Path, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.config = json.loads((model / "config.json").read_text())
        self.weights = {name: each.to(dtype) for name, each in load_file(model / "model.safetensors").items()}
        self.adapter = {name: each.to(dtype) for name, each in load_file(adapter / WEIGHTS).items()}
        fields = json.loads((adapter / "adapter_config.json").read_text())
        self.scale = fields["lora_alpha"] / fields["r"]

    def __call__(
        self, tokens: Sequence[int], positions: Sequence[int], adapted: Sequence[bool], sees: torch.Tensor
    ) -> torch.Tensor:
        """[rows, vocabulary].

        Args:
            adapted: the rows whose linear layers have the adapter.
            sees: [rows, rows], which rows a row attends to.
        """
        config, weights = self.config, self.weights
        heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
        width: int = config["hidden_size"] // heads
        epsilon: float = config["rms_norm_eps"]
        turned: float = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        angles = torch.tensor(positions).double()[:, None] * turned ** (-torch.arange(0, width, 2).double() / width)
        cos, sin = (each.repeat(1, 2).to(self.dtype) for each in (angles.cos(), angles.sin()))
        mask = torch.where(sees, 0.0, -torch.inf).to(self.dtype)
        own = torch.tensor(adapted)[:, None].to(self.dtype)

        def linear(name: str, rows: torch.Tensor) -> torch.Tensor:
            part = f"base_model.model.{name}"
            low = rows @ self.adapter[f"{part}.lora_A.weight"].T @ self.adapter[f"{part}.lora_B.weight"].T
            made: torch.Tensor = rows @ weights[f"{name}.weight"].T + own * self.scale * low
            return made

        def norm(name: str, rows: torch.Tensor) -> torch.Tensor:
            size = (rows.square().mean(-1, keepdim=True) + epsilon).rsqrt()
            made: torch.Tensor = rows * size * weights[f"{name}.weight"]
            return made

        def turn(rows: torch.Tensor) -> torch.Tensor:
            first, second = rows.chunk(2, dim=-1)
            return rows * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

        embedding = weights["model.embed_tokens.weight"]
        hidden = embedding[list(tokens)]
        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            rows = norm(f"{layer}.input_layernorm", hidden)
            query, key, value = (
                linear(f"{layer}.self_attn.{each}_proj", rows).view(len(tokens), -1, width) for each in "qkv"
            )
            query, key = turn(query), turn(key)
            key, value = (each.repeat_interleave(heads // shared, dim=1) for each in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query, key) / width**0.5 + mask
            made = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(len(tokens), -1)
            hidden = hidden + linear(f"{layer}.self_attn.o_proj", made)
            rows = norm(f"{layer}.post_attention_layernorm", hidden)
            gate = torch.nn.functional.silu(linear(f"{layer}.mlp.gate_proj", rows))
            hidden = hidden + linear(f"{layer}.mlp.down_proj", gate * linear(f"{layer}.mlp.up_proj", rows))
        return norm("model.norm", hidden) @ embedding.T


def by_formulas(model: Path, adapter: Path, fault: str = "") -> torch.Tensor:
    """What the last pass says: after the text's last token, each drafted node and each row of noise; with a fault."""
    text, nodes, rows = len(TEXT), len(NODES), len(NOISE)
    count = text + nodes + rows
    sees = torch.zeros(count, count, dtype=torch.bool)
    sees[:text, :text] = torch.ones(text, text).tril().bool()
    for node, parent in enumerate(BEHIND):
        sees[text + node] = sees[text - 1 if parent < 0 else text + parent]
        sees[text + node, text + node] = True
    sees[text + nodes :, :text] = True
    sees[text + nodes :, text + nodes :] = torch.ones(rows, rows).tril().bool()
    depth = [0 if parent < 0 else 1 for parent in BEHIND]
    positions = [*range(text), *(text + each for each in depth), *range(text, text + rows)]
    adapted = [False] * (text + nodes) + [True] * rows
    if fault == "a position further":
        positions[text + nodes :] = range(text + 1, text + rows + 1)
    elif fault == "the text's last row adapted":
        adapted[text - 1] = True
    elif fault == "noise without its adapter":
        adapted[text + nodes :] = [False] * rows
    elif fault == "drafted nodes that see noise":
        sees[text : text + nodes, text + nodes] = True
    elif fault == "noise that sees drafted nodes":
        sees[text + nodes :, text] = True
    elif fault == "noise that sees all noise":
        sees[text + nodes :, text + nodes :] = True
    elif fault == "noise that sees itself alone":
        sees[text + nodes :, text + nodes :] = torch.eye(rows).bool()
    elif fault:
        raise ValueError(fault)
    return Formulas(model, adapter)((*TEXT, *NODES, *NOISE), positions, adapted, sees)[text - 1 :]


FAULTS = (
    "a position further", "the text's last row adapted", "noise without its adapter", "drafted nodes that see noise",
    "noise that sees drafted nodes", "noise that sees all noise", "noise that sees itself alone",
)  # fmt: skip


def differs(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def test_rows_are_what_the_formulas_say(targets: tuple[TransformersTarget, ...], tiny_model: Path, adapter: Path) -> None:
    found = computed(targets[0], last_pass())
    assert differs(found, by_formulas(tiny_model, adapter)) < 1e-4
    for fault in FAULTS:
        assert differs(found, by_formulas(tiny_model, adapter, fault)) > 1e-2, fault


def test_noise_tells_how_likely_its_guesses_are(
    targets: tuple[TransformersTarget, ...], tiny_model: Path, adapter: Path
) -> None:
    target, expected = targets[0], by_formulas(tiny_model, adapter).softmax(-1)
    begun(target)
    target.begin([replace(last_pass(), top_k=3)])
    (outcome,) = target.finish()
    target.close("r")
    own = 1 + len(NODES)
    assert not any(outcome.chances[:own]) and len(outcome.chances) == len(outcome.top_ids) == own + len(NOISE)
    for row in range(own, own + len(NOISE)):
        best = expected[row].topk(3)
        assert outcome.top_ids[row] == tuple(best.indices.tolist())
        assert outcome.chances[row] == pytest.approx(best.values.tolist(), rel=1e-3)


def test_no_other_row_has_other_bits(targets: tuple[TransformersTarget, ...]) -> None:
    drafting, plain = targets
    expected = computed(plain, last_pass(noise=False))
    assert torch.equal(computed(drafting, last_pass(noise=False)), expected)
    assert torch.equal(computed(drafting, last_pass())[: len(expected)], expected)
    # Without an adapter, noise is rows as all others.
    assert not torch.equal(computed(drafting, last_pass())[-1], computed(plain, last_pass())[-1])
    # Another request in the pass, whose rows come before and behind.
    begun(drafting, "other")
    begun(drafting)
    for batch in ([last_pass("other"), last_pass()], [last_pass(), last_pass("other", noise=False)]):
        for found in drafting.forward(batch):
            assert torch.equal(found[: len(expected)], expected)
    for request_id in ("other", "r"):
        drafting.close(request_id)


def test_nothing_of_the_noise_is_left(targets: tuple[TransformersTarget, ...]) -> None:
    """Its keys and values are overwritten by what is committed behind."""
    drafting, plain = targets
    for target in targets:
        begun(target)
    drafting.forward([last_pass()])
    plain.forward([last_pass(noise=False)])
    for target in targets:
        # The text's last token, and two drafted nodes.
        target.keep("r", len(TEXT) - 1, [0, 1, 2])
    following = Rows(request_id="r", context=len(TEXT) + 2, tokens=(90, 91, 92), logits=1)
    after = [target.forward([following])[0] for target in targets]
    for target in targets:
        target.close("r")
    assert torch.equal(*after)


def test_noise_has_no_other_adapter(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    """In an answer with an adapter, only the rows that are no noise have that one."""
    billing = {"billing": str(make_adapter(tmp_path / "billing", tiny_model, seed=3, targets=("lm_head",)))}
    both = TransformersTarget(config_of(tiny_model, draft_adapter=adapter, lora_modules=billing))
    alone = TransformersTarget(config_of(tiny_model, lora_modules=billing))
    expected = computed(alone, last_pass(noise=False), "billing")
    found = computed(both, last_pass(), "billing")
    assert torch.equal(found[: len(expected)], expected)
    assert not torch.equal(expected, computed(both, last_pass(noise=False)))
    # Keys and values are the same, since it adapts the output layer alone.
    assert torch.equal(found[len(expected) :], computed(both, last_pass())[len(expected) :])


def test_an_adapter_of_the_output_layer_adds_to_noise_alone(tiny_model: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "head", tiny_model, seed=4, targets=("lm_head",))
    target = TransformersTarget(config_of(tiny_model, draft_adapter=folder))
    plain = computed(TransformersTarget(config_of(tiny_model)), last_pass())
    found, own = computed(target, last_pass()), 1 + len(NODES)
    assert torch.equal(found[:own], plain[:own]) and not torch.isclose(found[own:], plain[own:]).all()
    # In a pass over all of the text, of whose rows only the last is read.
    rows, before = last_pass(), len(TEXT) - 1
    whole = replace(rows, context=0, tokens=(*TEXT[:-1], *rows.tokens), noise=tuple(before + row for row in rows.noise))
    assert target.open("r", len(TEXT) + 40)
    assert torch.equal(target.forward([whole])[0], found)
    target.close("r")


def test_names_without_pefts_prefix(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    """As some of the authors' files have them."""
    copy = Path(shutil.copytree(adapter, tmp_path / "short"))
    tensors = load_file(copy / WEIGHTS)
    save_file({name.removeprefix("base_model.model."): each for name, each in tensors.items()}, copy / WEIGHTS)
    found = [
        computed(TransformersTarget(config_of(tiny_model, draft_adapter=each)), last_pass()) for each in (adapter, copy)
    ]
    assert torch.equal(*found)


def test_an_adapter_for_another_model_is_refused(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", hidden_size=32)
    with refuses(ConfigurationError, says="must be (32, 4)"):
        TransformersTarget(config_of(other, draft_adapter=adapter))
    copy = Path(shutil.copytree(adapter, tmp_path / "damaged"))
    tensors = load_file(copy / WEIGHTS)
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"][3, 1] = torch.nan
    save_file(tensors, copy / WEIGHTS)
    with refuses(ConfigurationError, says="mlp.up_proj holds infinite values or NaN"):
        TransformersTarget(config_of(tiny_model, draft_adapter=copy))


def test_layers_with_a_state_have_no_noise(adapter: Path, tmp_path: Path) -> None:
    model = make_hybrid("lfm2", tmp_path / "hybrid")
    with refuses(ConfigurationError, "drafter.models", says="layers with a state"):
        TransformersTarget(config_of(model, draft_adapter=adapter))
