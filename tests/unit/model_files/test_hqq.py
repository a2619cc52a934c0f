"""HQQ's layout by what the package hqq (0.2.8) itself stored of small weights, and the numbers that it read from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.model_files.weights.headers import read_header
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.hqq import Hqq

# By case, the tensors of a layer: type, shape and bytes; and the numbers' bytes.
RECORDS = json.loads((Path(__file__).parent / "hqq_by_the_package.json").read_text())


def tensor(dtype: str, shape: list[int], content: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(content), dtype=getattr(torch, dtype)).view(shape)


@pytest.mark.parametrize("case", RECORDS)
def test_numbers_are_those_of_the_package(case: str, tmp_path: Path) -> None:
    record = dict(RECORDS[case])
    numbers = tensor("float32", [8, 8], record.pop("numbers"))
    stored = {f"a.b.{name}": tensor(*entry) for name, entry in record.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (found,) = Hqq(QuantisationFields({"quant_method": "hqq"}, "quantization_config")).find(
        read_header(tmp_path / "model.safetensors")
    )
    assert (found.name, found.shape) == ("a.b.weight", (8, 8))
    # Nothing is left over that would have no place in the model.
    assert set(found.parts.values()) == stored.keys()
    assert torch.equal(found.weight(stored.__getitem__), numbers)
