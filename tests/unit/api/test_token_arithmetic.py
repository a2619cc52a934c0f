"""``system_fingerprint`` differs where tokens could, and is the same for servers that answer alike."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from services.api.http.openai.usage import fingerprint
from tests.servers.service import pipeline


async def told(folder: Path, *flags: str) -> str:
    async with pipeline(folder, *flags) as running:
        return fingerprint((await running.router.models())[0])


async def test_weights_dtype_and_kernels_count(tiny_model: Path, tmp_path: Path) -> None:
    plain = await told(tiny_model, "verifier.kernels=torch")
    assert await told(tiny_model, "verifier.kernels=torch") == plain
    assert await told(tiny_model, "verifier.kernels=onednn") != plain
    assert await told(tiny_model, "verifier.kernels=torch", "verifier.dtype=bfloat16") != plain
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    (file,) = other.glob("*.safetensors")
    weights = load_file(file)
    name = min(weights)
    weights[name] = weights[name] + 0.5
    save_file(weights, file, {"format": "pt"})
    assert await told(other, "verifier.kernels=torch") != plain


async def test_formats_that_give_the_same_bits_do_not_count(tiny_model: Path) -> None:
    first, second = [await told(tiny_model, f"verifier.weights={weights}") for weights in ("float32", "as_stored")]
    assert first == second
