"""A GGUF file brought into another form holds the same weights, and all that the file says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, quants

from benchmarks.bench import gguf_forms
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.tiny_gguf import make_tiny_gguf

# A vector, a matrix of either kind of blocks, and matrices in float32.
KINDS = {"attn_q": "Q4_1", "ffn_up": "Q8_0", "ffn_down": "Q4_0"}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("gguf"), KINDS)


def values(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: quants.dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}


def kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


def test_float32_has_the_very_numbers(gguf: Path, tmp_path: Path) -> None:
    made = gguf_forms.brought_into("f32", gguf, tmp_path)
    assert set(kinds(made).values()) == {"F32"}
    before, after = values(gguf), values(made)
    assert list(before) == list(after)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_q8_0_rounds_matrices_within_half_a_step(gguf: Path, tmp_path: Path) -> None:
    made = gguf_forms.brought_into("q8_0", gguf, tmp_path)
    before, after = values(gguf), values(made)
    for name, kind in kinds(made).items():
        assert kind == ("F32" if before[name].ndim == 1 else "Q8_0"), name
        if kind == "F32":
            assert np.array_equal(before[name], after[name])
            continue
        blocks, rounded = before[name].reshape(-1, 32), after[name].reshape(-1, 32)
        steps = np.abs(blocks).max(axis=1, keepdims=True) / 127
        # The step itself is stored in float16.
        assert (np.abs(blocks - rounded) <= 0.5 * steps + 127 * steps * 2**-11).all(), name
    assert any(not np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("form", gguf_forms.FORMS)
def test_what_the_file_says_of_the_model_is_kept(gguf: Path, tmp_path: Path, form: str) -> None:
    before, after = GGUFReader(gguf).fields, GGUFReader(gguf_forms.brought_into(form, gguf, tmp_path)).fields
    for name, field in before.items():
        if not name.startswith("GGUF."):
            assert (after[name].types, after[name].contents()) == (field.types, field.contents()), name
    assert after["general.file_type"].contents() == gguf_forms.FORMS[form][1]


def test_it_is_written_once_and_again_for_another_file(gguf: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(gguf.read_bytes())
    first = gguf_forms.brought_into("q8_0", mine, tmp_path / "made")
    first.write_bytes(b"kept")
    assert gguf_forms.brought_into("q8_0", mine, tmp_path / "made").read_bytes() == b"kept"
    mine.write_bytes(gguf.read_bytes() + b"\0")
    assert gguf_forms.brought_into("q8_0", mine, tmp_path / "made") != first


@pytest.mark.parametrize("size", [0, 100, -100])
def test_a_damaged_file_is_named_and_nothing_is_left(gguf: Path, tmp_path: Path, size: int) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf.read_bytes()[:size])
    with refuses(ConfigurationError, field="broken.gguf"):
        gguf_forms.brought_into("f32", broken, tmp_path / "made")
    assert not list((tmp_path / "made").iterdir())
