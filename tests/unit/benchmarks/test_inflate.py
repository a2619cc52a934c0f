"""An inflated model says what the small one says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.inflate import HeadSizes, inflate


@pytest.mark.parametrize("heads", [None, HeadSizes(16, 4, 40)], ids=["as before", "wider, with more queries a key"])
def test_the_same_text_from_a_larger_model(tiny_model: Path, tmp_path: Path, heads: HeadSizes | None) -> None:
    small = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    total = inflate(tiny_model, tmp_path, width=160, intermediate=300, layers=5, dtype=torch.float32, heads=heads)
    large = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert total == sum(parameter.numel() for parameter in large.parameters()) > 3 * small.num_parameters()
    ids = torch.arange(5, 85)[None]
    with torch.no_grad():
        assert torch.allclose(large(ids).logits, small(ids).logits, atol=1e-4)
    assert torch.equal(large.generate(ids, max_new_tokens=30), small.generate(ids, max_new_tokens=30))


def test_nothing_shrinks(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--layers is 1: the model has 2"):
        inflate(tiny_model, tmp_path, width=64, intermediate=128, layers=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="--head-size is 8: the model has 16"):
        inflate(tiny_model, tmp_path, width=64, intermediate=128, layers=2, dtype=torch.float32, heads=HeadSizes(8, 4, 8))
