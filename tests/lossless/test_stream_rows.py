"""Stream rows change no bit of any other row, leave nothing behind, and are what the paper's formulas say."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.models.drafters import read_stream_weights
from services.drafter.heads.streams.files import load_streams
from services.drafter.heads.streams.source import StreamSource
from services.drafter.sessions.known_states import KnownStates, row_of
from services.drafter.sources.interfaces import DraftWanted
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.library import library
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model import fused_layers
from services.verifier.model.stream_rows import StreamRows
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.messages import OpenSession
from speculation.types import Features
from tests.engine.stage_forks import launch_fork
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_streams
from tests.unit.drafter.heads.test_streams import LAYERS, STREAMS, TEXT, TOP, Bare, expected

pytestmark = pytest.mark.xdist_group("stream rows")

IN_PASS = tuple(range(LAYERS, LAYERS + STREAMS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def folder(model: Path) -> Path:
    return make_streams(model, model.parent / "streams", layers=TOP, streams=STREAMS)


def config_of(model: Path, **settings: object) -> TargetConfig:
    return TargetConfig(
        model_path=str(model),
        threads=1,
        kv_cache_tokens=2048,
        max_model_len=512,
        **settings,  # type: ignore[arg-type]
    )


@contextmanager
def computed_by(way: str, model: Path) -> Iterator[TargetConfig]:
    """A configuration of the target, and what it takes for it to be computed that way."""
    if way in ("auto", "modules") and library("auto") is None:
        pytest.skip("our kernels cannot be compiled here")
    with pytest.MonkeyPatch.context() as patch:
        if way == "modules":
            patch.setattr(fused_layers, "fuse", lambda *_: (0, "of the test"))
        yield config_of(model, kernels="auto" if way == "modules" else way)


# ``modules`` are our kernels in layers that are not computed by one call; ``onednn`` goes with attention by stacked tiles.
WAYS = ["auto", "modules", "onednn"]


@pytest.fixture(scope="module", params=WAYS)
def targets(request: pytest.FixtureRequest, model: Path, folder: Path) -> Iterator[tuple[TransformersTarget, ...]]:
    """The target with streams, and as it is without them."""
    with computed_by(request.param, model) as config:
        yield TransformersTarget(config, None, read_stream_weights(folder, model)), TransformersTarget(config)


def batches(vocab: int) -> Iterator[list[Rows]]:
    """Passes over several requests: prompts, chains and trees at several places, with streams on some of their rows."""
    source = random.Random(3)
    for requests in (1, 1, 2, 4):
        batch = []
        for number in range(requests):
            context = source.choice((0, 3, 61, 64, 90))
            chain, nodes = source.choice(((1, 5), (1, 17), (7, 3), (1, 0), (70, 4)))
            parents = tuple(source.randint(-1, node - 1) for node in range(nodes))
            tokens = tuple(source.randrange(vocab) for _ in range(chain + nodes))
            ends = tuple(chain - 1 + row for row in source.sample(range(nodes + 1), min(3, nodes + 1)))
            batch.append(
                Rows(
                    request_id=f"r{number}",
                    context=context,
                    tokens=tokens,
                    parents=parents,
                    logits=1 + nodes,
                    layers=(0, -1, *IN_PASS),
                    ends=ends,
                )
            )
        yield batch


def computed(target: TransformersTarget, batch: Sequence[Rows]) -> list[torch.Tensor]:
    """What a pass leaves: logits, the hidden states that all targets have, and the keys and values of all its rows."""
    for rows in batch:
        assert target.open(rows.request_id, 200)
        before = tuple(TEXT[at % len(TEXT)] for at in range(rows.context))
        if before:
            target.forward([Rows(request_id=rows.request_id, context=0, tokens=before, logits=0)])
            target.keep(rows.request_id, 0, range(len(before)))
    found = list(target.forward(batch))
    for rows in batch:
        data = target.features(rows.request_id, range(len(rows.tokens)))
        states = torch.frombuffer(bytearray(data.data), dtype=torch.float16).view(data.rows, len(data.layers), -1)
        found.append(states[:, :2])
        blocks = target.pool.blocks_of(rows.request_id)
        for slot in range(rows.context + len(rows.tokens)):
            block, offset = blocks[slot // BLOCK], slot % BLOCK
            found += [keys[block, :, :, offset].clone() for keys in target.pool.keys]
            found += [values[block, :, offset].clone() for values in target.pool.values]
    for rows in batch:
        target.close(rows.request_id)
    return found


def plain(batch: Sequence[Rows]) -> list[Rows]:
    return [replace(rows, ends=(), layers=(0, -1)) for rows in batch]


@pytest.mark.examples(3)
def test_no_bit_of_another_row_changes(targets: tuple[TransformersTarget, TransformersTarget]) -> None:
    """Logits, hidden states, keys and values: as without streams, and as in a target that has none."""
    target, bare = targets
    assert target.exact and bare.exact
    for batch in batches(target.vocab_size):
        found, without, served = computed(target, batch), computed(target, plain(batch)), computed(bare, plain(batch))
        assert all(map(torch.equal, found, without))
        assert all(map(torch.equal, found, served))


def test_a_planted_leak_is_found(targets: tuple[TransformersTarget, TransformersTarget]) -> None:
    """One other row that streams are added to, in one layer."""
    target, bare = targets
    stream_rows = target.stream_rows
    assert stream_rows is not None
    layer = stream_rows._layers[0]

    def leak(module: object, given: tuple[torch.Tensor, ...], made: torch.Tensor) -> torch.Tensor:
        return torch.cat((made[:, :1] + made[:, -1:], made[:, 1:]), dim=1)

    batch = next(batches(target.vocab_size))
    hook = layer.register_forward_hook(leak)
    found = computed(target, batch)
    hook.remove()
    assert not all(map(torch.equal, found, computed(bare, plain(batch))))


def test_streams_are_what_the_formulas_say(
    targets: tuple[TransformersTarget, TransformersTarget], model: Path, folder: Path
) -> None:
    """Of the chain's end and of nodes, each by its own path; at the border of a block, beside another request."""
    target, _ = targets
    bare, streams = Bare(model), load_streams(folder, model).double()
    text = (TEXT * 2)[:80]
    for chain in (5, 62):
        for name in ("a", "b"):
            assert target.open(name, 160)
        # Some of it is committed already.
        before = chain - 3
        target.forward([Rows(request_id="a", context=0, tokens=tuple(text[:before]), logits=0)])
        target.keep("a", 0, range(before))
        tree = Rows(
            request_id="a", context=before, tokens=(*text[before:chain], 9, 8, 7, 6), parents=(-1, -1, 1, 2), logits=5,
            layers=IN_PASS, ends=(2, 3, 6),
        )  # fmt: skip
        other = Rows(request_id="b", context=0, tokens=tuple(text[3:9]), logits=1, layers=IN_PASS, ends=(5,))
        target.forward([other, tree])
        paths = {2: [], 3: [9], 6: [8, 7, 6]}
        for row, path in paths.items():
            assert torch.allclose(made(target, "a", row), expected(bare, streams, [*text[:chain], *path, 0]), atol=5e-3)
        assert torch.allclose(made(target, "b", 5), expected(bare, streams, [*text[3:9], 0]), atol=5e-3)
        # Rows without streams hold zeros.
        assert not made(target, "a", 4).any()
        for name in ("a", "b"):
            target.close(name)


def test_drafts_are_those_of_two_steps(
    targets: tuple[TransformersTarget, TransformersTarget], model: Path, folder: Path
) -> None:
    """From what one pass reports, and from the states of all its rows."""
    target, _ = targets
    source = StreamSource(load_streams(folder, model), window=1000)
    state = LAYERS - TOP - 1
    for length in (2, 9, 40, 59):
        text = TEXT[:length]
        assert target.open("a", 100)
        target.forward(
            [Rows(request_id="a", context=0, tokens=tuple(text), logits=1, layers=(state, *IN_PASS), ends=(length - 1,))]
        )
        data = target.features("a", range(length))
        target.close("a")
        trees = []
        for layers, rows in (((state,), range(length)), (IN_PASS, [length - 1])):
            states = KnownStates()
            for row in rows:
                own = row_of(data, row, layers)
                assert own is not None
                states.add(own)
            opened = OpenSession(
                session_id="a", tokens=(*text, TEXT[length]), prompt_length=length, sources=("streaming",), max_nodes=8
            )
            wanted = DraftWanted(session=source.open(opened), max_nodes=8, states=states)
            trees += source.draft([wanted])
        first, second = trees
        assert first is not None and second is not None and len(first) == 8
        assert (first.tokens, first.parents) == (second.tokens, second.parents)
        assert np.allclose(first.scores, second.scores, atol=1e-2)


def test_streams_that_were_not_computed_give_no_draft(model: Path, folder: Path) -> None:
    """The walk ended at a row without streams, and the states of the rows are not reported."""
    source = StreamSource(load_streams(folder, model), window=1000)
    opened = OpenSession(session_id="a", tokens=(5, 6, 7), prompt_length=2, sources=("streaming",), max_nodes=8)
    states = KnownStates()
    width = STREAMS * 64
    states.add(Features(data=bytes(4 * width), rows=2, width=width, dtype="float16", layers=IN_PASS))
    assert source.draft([DraftWanted(session=source.open(opened), max_nodes=8, states=states)]) == [None]


def made(target: TransformersTarget, name: str, row: int) -> torch.Tensor:
    """[streams, h], float64, what is reported of a row's streams."""
    data = target.features(name, [row])
    assert data.layers == IN_PASS
    return torch.frombuffer(bytearray(data.data), dtype=torch.float16).view(STREAMS, -1).double()


def test_what_follows_sees_nothing_of_them(targets: tuple[TransformersTarget, TransformersTarget]) -> None:
    """Decoding goes on behind an accepted path, over the places where streams had their keys."""
    target, bare = targets
    logits = []
    for served, ends in ((target, (3, 5)), (bare, ())):
        assert served.open("a", 64)
        rows = Rows(request_id="a", context=0, tokens=(*TEXT[:4], 9, 8, 7), parents=(-1, -1, 1), logits=4, ends=ends)
        served.forward([rows])
        served.keep("a", 0, [0, 1, 2, 3, 5, 6])
        logits += [served.forward([Rows(request_id="a", context=6, tokens=(7, 6, 5, 4), logits=4)])[0]]
        served.close("a")
    assert torch.equal(*logits)


@pytest.mark.exhaustive
def test_the_last_stage_computes_them(model: Path, folder: Path) -> None:
    weights = read_stream_weights(folder, model)
    alone = TransformersTarget(config_of(model), None, weights)
    split = TransformersTarget(config_of(model, stages=2), launch_fork, weights)
    try:
        for batch in batches(alone.vocab_size):
            # The other stage's part of the cache is not here.
            logits = slice(0, len(batch))
            assert all(map(torch.equal, computed(split, batch)[logits], computed(alone, batch)[logits]))
            rows = batch[0]
            for target in (split, alone):
                assert target.open(rows.request_id, 200)
                target.forward([replace(rows, context=0, layers=IN_PASS)])
            data = [target.features(rows.request_id, rows.ends[:1]) for target in (split, alone)]
            assert data[0] == data[1]
            for target in (split, alone):
                target.close(rows.request_id)
    finally:
        split.shutdown()


@pytest.mark.exhaustive
def test_layers_on_two_stages_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "target", num_hidden_layers=LAYERS)
    weights = read_stream_weights(make_streams(model, tmp_path / "streams", layers=3, streams=2), model)
    with refuses(ConfigurationError, field="streams"):
        TransformersTarget(config_of(model, stages=2), launch_fork, weights)


def test_streams_of_another_model_are_refused(model: Path, folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "wide", num_hidden_layers=LAYERS, intermediate_size=192)
    with refuses(ConfigurationError, field="streams"):
        TransformersTarget(config_of(other), None, read_stream_weights(folder, model))


def test_models_that_cannot_take_stream_rows_are_refused(model: Path, folder: Path) -> None:
    weights = read_stream_weights(folder, model)
    with refuses(ConfigurationError, field="streams", says="it has layers with a state"):
        weights.check(1, with_states=True)
    with refuses(ConfigurationError, field="verifier.tensor_parallel_size", value=2):
        weights.check(2, with_states=False)
    missing = replace(weights, adapters=tuple({"attn.c_proj": next(iter(layer.values()))} for layer in weights.adapters))
    with refuses(ConfigurationError, field="streams", says="LlamaDecoderLayer has no linear layer attn.c_proj"):
        TransformersTarget(config_of(model), None, missing)
    many = replace(weights, adapters=weights.adapters * 3)
    with refuses(ConfigurationError, field="streams", says="the last 6 layers, and the last pipeline stage has 4"):
        TransformersTarget(config_of(model), None, many)


@pytest.mark.parametrize(
    ("broken", "refusal"),
    [
        ({"norm": None}, ("streams", None, "LlamaForCausalLM has no norm")),
        ({"rotary_emb": None}, ("streams", None, "LlamaForCausalLM has no rotary_emb")),
        ({"rope_type": "dynamic"}, ("streams", None, "the rotations of all rows change with the longest text")),
    ],
    ids=str,
)
def test_decoders_of_another_kind_are_refused(
    model: Path, folder: Path, broken: dict[str, object], refusal: tuple[object, ...]
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, value in broken.items():
        setattr(loaded.model.rotary_emb if name == "rope_type" else loaded.model, name, value)
    with refuses(ConfigurationError, *refusal):
        StreamRows(loaded, LAYERS, read_stream_weights(folder, model), torch.device("cpu"), torch.float32)


def test_streams_that_nobody_loaded_are_refused(model: Path) -> None:
    target = TransformersTarget(config_of(model))
    with refuses(InvalidArgument, "observe_layers", allowed=f"from -{LAYERS} to {LAYERS - 1}"):
        target.check_layers(IN_PASS)
    assert target.streams((0, *IN_PASS)) is None
