"""Models that would not be served are refused before a start: damaged files, too little memory, no room in the cache."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from cluster.checks import model_files, preflight
from cluster.settings.config import load
from services.model_files.weights.headers import check_weights
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.preflights import refused, settings_of
from tests.tiny_models.tiny_gguf import make_tiny_gguf


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a"', "config.json cannot be read"),
        ("[]", "no JSON object"),
        ("{}", "names no model_type"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_broken_configuration(content: str | bytes, message: str, model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused(model, tmp_path)


def test_broken_weights(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    for content, message in (
        (whole[:-1], f"has {len(whole) - 1:,} bytes instead of {len(whole):,}: it is cut off"),
        (whole[: 8 + header // 2], "cut off in its header"),
        (b"", "is no safetensors file"),
        (b"<html>" * 10, "is no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of git-lfs"),
    ):
        file.write_bytes(content)
        assert message in refused(model, tmp_path)
    file.unlink()
    assert "no model.safetensors there" in refused(model, tmp_path)
    (model / "blocks.safetensors").write_bytes(whole[:-1])
    assert "blocks.safetensors has" in refused(model, tmp_path)
    (model / "blocks.safetensors").unlink()
    index = model / "model.safetensors.index.json"
    norm = "model.norm.weight"
    index.write_text(json.dumps({"weight_map": {norm: "one.safetensors", "b": "two.safetensors"}}))
    (model / "one.safetensors").write_bytes(whole)
    assert "two.safetensors is missing" in refused(model, tmp_path)
    (model / "two.safetensors").write_bytes(whole)
    assert "two.safetensors holds no b, which model.safetensors.index.json says is there" in refused(model, tmp_path)
    index.write_text(json.dumps({"weight_map": {norm: "one.safetensors", "model.embed_tokens.weight": "two.safetensors"}}))
    preflight.preflight(settings_of(model, tmp_path))


def test_a_broken_tokenizer_and_an_empty_folder(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be read" in refused(model, tmp_path)
    (model / "config.json").unlink()
    assert "the folder has no config.json" in refused(model, tmp_path)


def test_gguf_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"version https://git-lfs")
    assert "pointer of git-lfs" in refused(file, tmp_path)
    file.write_bytes(b"PK\x03\x04")
    assert "no GGUF file" in refused(file, tmp_path)
    file.write_bytes(b"GGUF\x03")
    assert "is cut off in its header" in refused(file, tmp_path)
    whole = make_tiny_gguf(tmp_path / "gguf", {"ffn": "Q4_1"})
    assert preflight.preflight(settings_of(whole, tmp_path)) != ()
    data = whole.read_bytes()
    # The last tensor is padded, so that the last byte is not missed.
    file.write_bytes(data[:-64])
    assert f"has {len(data) - 64:,} bytes instead of" in refused(file, tmp_path)
    file.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gamma", 1))
    assert "its architecture is 'gamma', which transformers" in refused(file, tmp_path)


def test_memory_is_counted_from_headers(model: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="pt") as file:
        numbers = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    config = json.loads((model / "config.json").read_text())
    weights = model_files.count_weights(check_weights(model, config))
    assert weights.in_layers + weights.others == numbers
    assert weights.in_layers > 0
    assert weights.stored == 4
    verifier = settings_of(model, tmp_path).verifier
    # Two layers, keys and values of two heads of 16 numbers, four bytes each.
    assert (
        model_files.cache_bytes(verifier, json.loads((model / "config.json").read_text()), 16384)
        == 2 * 2 * 2 * 16 * 4 * 16384
    )
    # Rounded: a byte each, and a scale for each row of a head.
    rounded = verifier.model_copy(update={"kv_cache_dtype": "fp8"})
    assert model_files.cache_bytes(rounded, config, 16384) == 2 * 2 * 2 * (16 + 4) * 16384
    with pytest.raises(ConfigurationError, match="the model does not fit"):
        preflight.preflight(settings_of(model, tmp_path), memory=lambda: 4.0 * numbers + 100)


def test_a_model_of_the_hub_that_was_fetched_before(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    settings = settings_of(Path("some/model"), tmp_path)
    assert preflight.preflight(settings) != ()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refuses(ConfigurationError, field="model", value="some/model"):
        preflight.preflight(settings)
    kept = tmp_path / "hub" / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    shutil.copytree(model, kept / "snapshots" / "abc")
    assert preflight.preflight(settings) == ()
    assert preflight.model_folder(settings) == kept / "snapshots" / "abc"


def test_a_cache_that_is_full_is_found_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))
    settings = load(flags=["server.port=0", f"cache_dir={tmp_path / 'cache'}"], environ={})
    with refuses(ConfigurationError, field="cache_dir", value="cache"):
        preflight.preflight(settings)
