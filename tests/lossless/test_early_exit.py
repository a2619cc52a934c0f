"""An early exit takes streams from rows behind unlikely edges, as its formula says, and changes no bit of any row that stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cluster.models.drafters import read_stream_weights
from services.drafter.heads.streams.files import load_streams
from services.verifier.kernels.native.low_rank_kernel import LowRank
from services.verifier.model.early_exit import EarlyExit, Pruning
from services.verifier.model.stream_rows import StreamRows
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.lossless.test_stream_rows import IN_PASS, WAYS, batches, computed, computed_by, config_of, made, plain
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_streams
from tests.unit.drafter.heads.test_streams import LAYERS, STREAMS, TEXT, TOP, Bare

pytestmark = pytest.mark.xdist_group("early exit")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def folder(model: Path) -> Path:
    return make_streams(model, model.parent / "streams", layers=TOP, streams=STREAMS, pruning_rank=3)


# About half of the edges to random tokens are less likely.
BELOW = 3e-5


@pytest.fixture(scope="module", params=WAYS)
def targets(request: pytest.FixtureRequest, model: Path, folder: Path) -> Iterator[tuple[TransformersTarget, ...]]:
    """The target that prunes, the same where nothing is pruned, and as it is without streams."""
    with computed_by(request.param, model) as config:
        weights = [read_stream_weights(folder, model, below) for below in (BELOW, 0.0)]
        yield (*(TransformersTarget(config, None, each) for each in weights), TransformersTarget(config))


@pytest.mark.examples(3)
def test_no_bit_of_another_row_changes(targets: tuple[TransformersTarget, ...]) -> None:
    pruning, _, bare = targets
    for batch in batches(pruning.vocab_size):
        assert all(map(torch.equal, computed(pruning, batch), computed(bare, plain(batch))))


def test_a_planted_change_is_found(targets: tuple[TransformersTarget, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit that adds its adapter's term to the rows themselves."""
    pruning, _, bare = targets
    right = EarlyExit.pruned

    def wrong(self: EarlyExit, batch: Sequence[Rows], states: torch.Tensor) -> list[Rows]:
        adapter = self._pruning.adapter
        states += nn.functional.linear(nn.functional.linear(states, adapter.down), adapter.up)
        return right(self, batch, states)

    monkeypatch.setattr(EarlyExit, "pruned", wrong)
    batch = next(batches(pruning.vocab_size))
    assert not all(map(torch.equal, computed(pruning, batch), computed(bare, plain(batch))))


def test_rows_behind_unlikely_edges_have_no_streams(
    targets: tuple[TransformersTarget, ...], model: Path, folder: Path
) -> None:
    """As the formula says, and what the other rows have is what they have where nothing is pruned."""
    pruning, whole, _ = targets
    bare, streams = Bare(model), load_streams(folder, model).double()
    parents = (-1, 0, -1, 2, 3, 0, -1)
    path = {0: (0,), 1: (0, 1), 2: (2,), 3: (2, 3), 4: (2, 3, 4), 5: (0, 5), 6: (6,)}
    dropped = 0
    for trial in range(4):
        chain, tokens = TEXT[: 5 + trial], TEXT[20 + 8 * trial : 27 + 8 * trial]
        stay = {}
        for end, nodes in path.items():
            text = [*chain, *(tokens[node] for node in nodes)]
            early = streams.early(bare.read(text)[0][len(chain) - 1 : -1])
            assert early is not None
            chances = bare.model.lm_head(early).softmax(-1)[range(len(nodes)), text[len(chain) :]]
            stay[end] = bool((chances >= BELOW).all())
        dropped += list(stay.values()).count(False)
        for target in (pruning, whole):
            assert target.open("a", 64)
            ends = tuple(len(chain) + end for end in range(-1, 7))
            rows = Rows(
                request_id="a", context=0, tokens=(*chain, *tokens), parents=parents, logits=8, layers=IN_PASS, ends=ends
            )  # fmt: skip
            target.forward([rows])
        assert torch.equal(made(pruning, "a", ends[0]), made(whole, "a", ends[0])), "the root hangs on no edge"
        for end, stays in stay.items():
            found = made(pruning, "a", ends[1 + end])
            assert torch.equal(found, made(whole, "a", ends[1 + end])) if stays else not found.any(), (trial, end)
        for target in (pruning, whole):
            target.close("a")
    assert 4 < dropped < 24, ("both happen", dropped)


def test_all_rows_may_be_pruned(model: Path, folder: Path) -> None:
    """No stream row enters then, and the pass goes on as it began."""
    weights = read_stream_weights(folder, model, 0.99)
    target, bare = TransformersTarget(config_of(model), None, weights), TransformersTarget(config_of(model))
    tree = Rows(request_id="a", context=0, tokens=(*TEXT[:4], 9, 8), parents=(-1, 0), logits=3, ends=(4, 5))
    logits = []
    for served in (target, bare):
        assert served.open("a", 64)
        logits.append(served.forward([tree if served is target else replace(tree, ends=())])[0])
    assert torch.equal(*logits)


def test_streams_without_an_early_exit_are_refused(model: Path, tmp_path: Path) -> None:
    folder = make_streams(model, tmp_path / "streams", layers=TOP, streams=STREAMS)
    with refuses(ConfigurationError, field="drafter.streaming_prune_below", value="0.1"):
        read_stream_weights(folder, model, 0.1)


def test_an_exit_for_other_states_is_refused(model: Path, folder: Path) -> None:
    weights = read_stream_weights(folder, model)
    wide = Pruning(adapter=LowRank(down=torch.zeros(2, 32), up=torch.zeros(32, 2)), below=0.1)
    loaded = Bare(model).model
    with refuses(ConfigurationError, field="streams"):
        StreamRows(loaded, LAYERS, replace(weights, pruning=wide), torch.device("cpu"), torch.float32)
