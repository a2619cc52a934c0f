"""Passes in memory that does not move, as a GPU captures them; here without capturing, against the ordinary ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from tests.tiny_models.attention_models import make_architecture
from tests.tiny_models.tiny import make_tiny_model


def passes(target: TransformersTarget) -> list[torch.Tensor]:
    """A prompt, two requests with trees across a border of tiles, and a pass that is longer than any bucket."""
    made = []
    for name in "ab":
        assert target.open(name, 400)
    made += target.forward([Rows(request_id="a", context=0, tokens=tuple(range(5, 66)), logits=61)])
    made += target.forward([Rows(request_id="b", context=0, tokens=tuple(range(90, 70, -1)), logits=20)])
    tree = Rows(request_id="a", context=61, tokens=(9, 1, 2, 3, 4, 8), parents=(-1, -1, 1, 2, 3), logits=6)
    made += target.forward([tree, Rows(request_id="b", context=20, tokens=(3, 4, 5), parents=(-1, -1), logits=3)])
    target.keep("a", 61, [0, 2, 3, 4])
    made += target.forward([Rows(request_id="a", context=65, tokens=(6,), logits=1)])
    made += target.forward([Rows(request_id="a", context=66, tokens=(7,) * 300, logits=1)])
    return made


KINDS = (
    "soft caps",
    "sinks",
    "chunks",
    "window in the mask of all",
    "latent",
    "two calls a layer",
    "alibi",
    "alibi by distance",
)


@pytest.mark.examples(3)
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_the_same_logits(tmp_path: Path, kind: str) -> None:
    folder = tmp_path
    if kind == "plain":
        make_tiny_model(folder)
    else:
        make_architecture(folder, kind)
    ordinary, static = (
        # Layers as on a GPU: torch's.
        TransformersTarget(TargetConfig(model_path=str(folder), kv_cache_tokens=2048, max_model_len=512, kernels="torch"))
        for _ in range(2)
    )
    part = static._part
    part._graphs = part._captured(replace(static._config, pass_requests=2, observed_layers=(0, -1)))
    for mine, other in zip(passes(static), passes(ordinary), strict=True):
        assert torch.allclose(mine, other, atol=2e-3)
        assert torch.equal(mine.argmax(-1), other.argmax(-1))
    # Graphs keep hidden states as well.
    states = []
    for target in (static, ordinary):
        target.keep("a", 66, range(300))
        # Beside a request that asks for none.
        beside = Rows(request_id="b", context=20, tokens=(5,), logits=1)
        made = target.forward([beside, Rows(request_id="a", context=366, tokens=(8, 9), logits=1, layers=(0, -1))])[1]
        states.append((made, target.features("a", [0, 1])))
    (mine, seen), (other, expected) = states
    assert torch.allclose(mine, other, atol=2e-3)
    assert (seen.rows, seen.width, seen.layers) == (expected.rows, expected.width, (0, -1))
    numbers, right = (torch.frombuffer(bytearray(each.data), dtype=torch.float16).float() for each in (seen, expected))
    torch.testing.assert_close(numbers, right, atol=4e-3, rtol=4e-3)
    # Other layers are in no graph.
    assert part._graphs.lay_out([beside], (1,)) is None
