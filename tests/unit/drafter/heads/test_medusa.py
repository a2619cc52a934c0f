"""Medusa's heads: what they compute, public checkpoints, trees of levels, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.levels import LevelForm
from services.drafter.heads.medusa.files import load_medusa
from services.drafter.heads.medusa.fixed_tree import CHOICES
from services.drafter.heads.medusa.source import MedusaSource
from services.drafter.heads.streams.files import load_streams
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted
from services.model_files.folder import tokenizer_digest
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession
from speculation.tree import depths, path_to
from speculation.types import Features, TokenTree
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_medusa, make_streams
from training.convert_pickles import convert

HEADS, SIZE = 3, 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target")


def state(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def drafted(source: MedusaSource, states: list[torch.Tensor], nodes: int = 12, **opened: Any) -> list[TokenTree | None]:
    """Drafts of sessions behind three tokens, of which the second one's state is known."""
    batch = []
    for number, each in enumerate(states):
        message = OpenSession(
            session_id=str(number), tokens=(5, 6, 7), prompt_length=2, sources=("medusa",), max_nodes=nodes, **opened
        )
        known = KnownStates()
        known.add(
            Features(data=each.numpy().astype("<f4").tobytes(), rows=1, width=SIZE, dtype="float32", start=1, layers=(-1,))
        )
        batch.append(DraftWanted(session=source.open(message), max_nodes=nodes, states=known))
    return source.draft(batch)


def levels(folder: Path, target: Path, given: torch.Tensor) -> torch.Tensor:
    """[heads, V], log-probabilities by the authors' formulas, from the files alone."""
    tensors = load_file(folder / "model.safetensors")
    output = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    found = []
    for head in range(HEADS):
        rows, block = given, 0
        while (weight := tensors.get(f"{head}.{block}.linear.weight")) is not None:
            inner = weight @ rows + tensors[f"{head}.{block}.linear.bias"]
            rows, block = rows + inner * torch.sigmoid(inner), block + 1
        found.append((tensors.get(f"{head}.{block}.weight", output) @ rows).log_softmax(-1))
    return torch.stack(found)


@pytest.mark.parametrize(("own_output", "blocks"), [(False, 1), (True, 1), (True, 2)])
def test_trees_are_the_likeliest_paths(target: Path, tmp_path: Path, own_output: bool, blocks: int) -> None:
    folder = make_medusa(target, tmp_path / "heads", own_output=own_output, blocks=blocks)
    source = MedusaSource(load_medusa(folder, target), form=LevelForm(width=12))
    for given, tree in zip((state(1), state(2)), drafted(source, [state(1), state(2)]), strict=True):
        assert tree is not None
        logs = levels(folder, target, given)
        # Every path of up to three tokens, each among the likeliest of its level.
        likely = [logs[level].topk(12) for level in range(HEADS)]
        sums = [np.array(0.0)]
        for each in likely:
            sums.append((sums[-1][..., None] + each.values.numpy()).ravel())
        best = np.sort(np.exp(np.concatenate(sums[1:])))[::-1][:12]
        assert np.allclose(sorted(tree.scores, reverse=True), best, rtol=1e-3)
        for node in range(len(tree)):
            path = [tree.tokens[each] for each in path_to(tree, node)]
            score = sum(float(logs[level, token]) for level, token in enumerate(path))
            assert np.isclose(np.log(tree.scores[node]), score, atol=1e-3)


def test_settings_bound_the_tree(target: Path, tmp_path: Path) -> None:
    heads = load_medusa(make_medusa(target, tmp_path / "heads"), target)
    (tree,) = drafted(MedusaSource(heads, form=LevelForm(depth=2, width=2)), [state(1)], nodes=30)
    assert tree is not None
    assert len(tree) == 2 + 4 and max(depths(tree)) == 2


@pytest.mark.parametrize("nodes", [3, 20, 64])
def test_the_fixed_tree_takes_the_same_ranks_at_every_step(target: Path, tmp_path: Path, nodes: int) -> None:
    folder = make_medusa(target, tmp_path / "heads")
    source = MedusaSource(load_medusa(folder, target), form=LevelForm(fixed="mc_sim_7b_63"))
    # These heads guess three tokens ahead.
    wanted = {tuple(map(int, path)) for path in CHOICES["mc_sim_7b_63"][:nodes] if len(path) <= HEADS}
    assert len(CHOICES["mc_sim_7b_63"]) == 63 and len(wanted) == {3: 3, 20: 20, 64: 61}[nodes]
    for given, tree in zip((state(1), state(2)), drafted(source, [state(1), state(2)], nodes=nodes), strict=True):
        assert tree is not None
        likely = levels(folder, target, given).topk(10).indices.tolist()
        paths = [[tree.tokens[each] for each in path_to(tree, node)] for node in range(len(tree))]
        found = {tuple(likely[level].index(token) for level, token in enumerate(path)) for path in paths}
        assert found == wanted and len(tree) == len(wanted)


def test_chains_are_drawn_for_rejection(target: Path, tmp_path: Path) -> None:
    source = MedusaSource(load_medusa(make_medusa(target, tmp_path / "heads"), target))
    (tree,) = drafted(source, [state(1)], temperature=0.8, sampled=True)
    assert tree is not None
    assert tree.parents == (-1, 0, 1) and len(tree.proposals) == HEADS


def test_the_authors_pickles_are_converted(target: Path, tmp_path: Path) -> None:
    folder = make_medusa(target, tmp_path / "heads", own_output=True)
    tensors = load_file(folder / "model.safetensors")
    public = tmp_path / "public"
    public.mkdir()
    torch.save(tensors, public / "medusa_lm_head.pt")
    # As published: the configuration knows of two heads.
    (public / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    with refuses(ConfigurationError, field="medusa_lm_head.pt", value="pickled"):
        inspect(public, target)
    convert(public, target=target)
    assert inspect(public, target).source == "medusa"
    given = [state(1)]
    assert drafted(MedusaSource(load_medusa(public, target)), given) == drafted(
        MedusaSource(load_medusa(folder, target)), given
    )


def test_it_waits_for_the_state(target: Path, tmp_path: Path) -> None:
    source = MedusaSource(load_medusa(make_medusa(target, tmp_path / "heads"), target))
    message = OpenSession(session_id="s", tokens=(5, 6, 7), prompt_length=3, sources=("medusa",), max_nodes=4)
    wanted = DraftWanted(session=source.open(message), max_nodes=4, states=KnownStates())
    assert source.draft([wanted]) == [None]


Change = Callable[[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]], object]


def _renamed(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


MEDUSA: list[tuple[Change, tuple[object, ...]]] = [
    (lambda config, tensors, record: config.update(hidden_size=32), ("hidden_size", 32)),
    (lambda config, tensors, record: config.update(vocab_size=999), ("vocab_size", 999)),
    (
        lambda config, tensors, record: tensors.update({"0.0.linear.weight": torch.zeros(32, 32)}),
        ("the width of 0.0.linear.weight", 32),
    ),
    (lambda config, tensors, record: config.update(accept_lenience=1.5), ("accept_lenience", "1.5")),
    (lambda config, tensors, record: tensors.pop("1.0.linear.bias"), ("the tensor 1.0.linear.bias", "missing")),
    (
        lambda config, tensors, record: tensors.update({"1.9.weight": torch.zeros(2, 2)}),
        ("the tensor 1.9.weight", "unknown"),
    ),
    (
        lambda config, tensors, record: tensors["2.0.linear.bias"].fill_(torch.nan),
        ("the tensor 2.0.linear.bias", "torch.float32"),
    ),
    (lambda config, tensors, record: record.update(tokenizer_sha256="0" * 64), ("heads",)),
]
STREAMS: list[tuple[Change, tuple[object, ...]]] = [
    (lambda config, tensors, record: config.update(hidden_size=32), ("hidden_size", 32)),
    (lambda config, tensors, record: config.update(num_hidden_layers=9), ("num_hidden_layers", 9)),
    (lambda config, tensors, record: config.update(vocab_size=999), ("vocab_size", 999)),
    (lambda config, tensors, record: config.update(speculators_config={"lenience": 0.7}), ("lenience", "0.7")),
    (lambda config, tensors, record: config.update(num_stream_layers=2), ("num_stream_layers", 2)),
    (lambda config, tensors, record: config.update(num_streams=4), ("the tensor stream_embeddings", "[3, 64]")),
    (
        lambda config, tensors, record: config.update(lora_rank=8),
        ("the tensor layers.1.self_attn.q_proj.lora_A.weight", "[4, 64]"),
    ),
    (
        lambda config, tensors, record: config.update(mode="shared"),
        ("mode", "shared"),
    ),
    (
        lambda config, tensors, record: _renamed(
            tensors, "layers.1.self_attn.q_proj.lora_A.weight", "layers.0.self_attn.q_proj.lora_A.weight"
        ),
        ("the tensor layers.1.self_attn.q_proj.lora_A.weight", "missing"),
    ),
    (
        lambda config, tensors, record: tensors.update({"layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}),
        ("the tensor layers.0.mlp.up_proj.lora_A.weight", "unknown"),
    ),
    (
        lambda config, tensors, record: tensors["stream_embeddings"].fill_(torch.inf),
        ("the tensor stream_embeddings", "torch.float32"),
    ),
    (lambda config, tensors, record: record.update(tokenizer_sha256="0" * 64), ("heads",)),
]


@pytest.mark.parametrize(
    ("kind", "change", "refusal"), [*(("medusa", *each) for each in MEDUSA), *(("streaming", *each) for each in STREAMS)]
)
def test_what_does_not_fit_is_refused_by_name(
    target: Path, tmp_path: Path, kind: str, change: Change, refusal: tuple[object, ...]
) -> None:
    makers: dict[str, Callable[[Path, Path], Path]] = {"medusa": make_medusa, "streaming": make_streams}
    loaders: dict[str, Callable[[Path, Path], object]] = {"medusa": load_medusa, "streaming": load_streams}
    folder, load = makers[kind](target, tmp_path / "heads"), loaders[kind]
    record: dict[str, Any] = {"tokenizer_sha256": tokenizer_digest(target)}
    (folder / "training.json").write_text(json.dumps(record))
    load(folder, target)
    assert inspect(folder, target).source == inspect(folder, None).source == kind
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors, record)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "training.json").write_text(json.dumps(record))
    save_file(tensors, folder / "model.safetensors")
    with refuses(ConfigurationError, *refusal) as caught:
        load(folder, target)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    if "finite" not in str(caught.value) and "tokenizer" not in str(caught.value):
        # That needs no weight to be read.
        with refuses(ConfigurationError, *refusal):
            inspect(folder, target)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"model_type": "gpt_neox"}, ("model_type", "gpt_neox")),
        ({"residual_multiplier": 0.5}, ("residual_multiplier", "0.5")),
        ({"hidden_act": "xielu"}, ("hidden_act", "xielu")),
        ({"intermediate_size": 96}, (None, None, "mlp.")),
    ],
)
def test_layers_that_streams_cannot_run_through(
    target: Path, tmp_path: Path, changes: dict[str, object], refusal: tuple[object, ...]
) -> None:
    folder = make_streams(target, tmp_path / "streams")
    other = Path(shutil.copytree(target, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text()) | changes
    (other / "config.json").write_text(json.dumps(config))
    for load in (lambda: load_streams(folder, other), lambda: inspect(folder, other)):
        with refuses(ConfigurationError, *refusal):
            load()


def test_another_mixer_is_refused(target: Path, tmp_path: Path) -> None:
    folder = make_streams(target, tmp_path / "streams")
    other = Path(shutil.copytree(target, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.router.weight"] = torch.zeros(2, 64)
    save_file(tensors, other / "model.safetensors")
    with refuses(ConfigurationError, says="model.layers.1.mlp.router.weight is [2, 64]: must be absent"):
        inspect(folder, other)
