"""Every kind of attention that is served: transformers' logits, and the same bits alone, in a chunk, in a tree, in a batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.verifier.config import TargetConfig
from services.verifier.kernels.native import attention_kernel as native_attention
from services.verifier.kernels.native.library import library
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from tests.tiny_models.attention_models import ARCHITECTURES, make_architecture

# Beyond every window and chunk, and beyond two tiles.
LENGTH = 140


@pytest.fixture(scope="module", params=["native", "tiled"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Attention by our own kernel, and by torch's matrix products; linear layers alike."""
    if library("auto") is None:
        pytest.skip("no kernels of our own here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tiled":
            patch.setattr(native_attention, "kernel_for", lambda *_: None)
        yield


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def served(
    request: pytest.FixtureRequest, backend: None, target_layout: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TransformersTarget, list[int], torch.Tensor]:
    """A target, a text, and transformers' logits."""
    folder: Path = tmp_path_factory.mktemp("model")
    model = make_architecture(folder, request.param)
    source = random.Random(1)
    text = [source.randrange(2, model.config.get_text_config().vocab_size) for _ in range(LENGTH)]
    with torch.no_grad():
        reference = model(torch.tensor([text])).logits[0]
    config = TargetConfig(model_path=str(folder), kv_cache_tokens=1024, max_model_len=400)
    return TransformersTarget(config), text, reference


@pytest.mark.examples(15)
def test_logits_are_the_references(served: tuple[TransformersTarget, list[int], torch.Tensor]) -> None:
    target, text, reference = served
    for name in ("whole", "alone", "other"):
        assert target.open(name, 200)
    whole = target.forward([Rows(request_id="whole", context=0, tokens=tuple(text), logits=LENGTH)])[0]
    # Rows of unscaled scores have large ones.
    assert torch.allclose(whole, reference, atol=5e-4)
    assert torch.equal(whole.argmax(-1), reference.argmax(-1))
    alone = [target.forward([Rows(request_id="alone", context=i, tokens=(text[i],), logits=1)])[0] for i in range(LENGTH)]
    assert torch.equal(torch.cat(alone), whole)
    target.forward([Rows(request_id="other", context=0, tokens=tuple(text[:70]), logits=0)])
    for start in (10, 60, 125):
        # The true continuation is nodes 1, 3 and 5, wrong ones strewn in; another request shares the pass.
        nodes = (text[start], 5, text[start + 1], 7, text[start + 2], 9, text[start + 3])
        tree = Rows(request_id="alone", context=start, tokens=nodes, parents=(-1, -1, 0, 1, 3, 3), logits=7)
        beside = Rows(request_id="other", context=70, tokens=tuple(text[70:75]), logits=5)
        found, others = target.forward([tree, beside])
        assert torch.equal(found[[0, 2, 4, 6]], whole[start : start + 4]), start
        assert torch.equal(others, whole[70:75])
        target.keep("alone", start, [0, 2, 4])
        kept = Rows(request_id="alone", context=start + 3, tokens=tuple(text[start + 3 : start + 8]), logits=5)
        assert torch.equal(target.forward([kept])[0], whole[start + 3 : start + 8])
        target.forward([Rows(request_id="alone", context=start, tokens=tuple(text[start : start + 10]), logits=0)])
    for name in ("whole", "alone", "other"):
        target.close(name)
