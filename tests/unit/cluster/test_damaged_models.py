"""Whatever folder or file is given as a model: served as transformers computes it, or refused with one line.

Bytes of the weights themselves are left alone, unless they become no numbers: nobody could notice.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from cluster.checks.preflight import preflight
from cluster.models.target import resolve
from cluster.settings.config import load
from services.router.tokens import Tokens
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.tiny_models.damage import damage, damage_gguf
from tests.tiny_models.tiny_gguf import make_tiny_gguf

BATCH = 50
FOLDERS, FILES = 8 * BATCH, 2 * BATCH
TEXT = tuple(range(5, 17))


def serve(model: Path, cache: Path) -> TransformersTarget:
    """As ``outrider serve`` does: what is checked beforehand, the tokeniser, the target."""
    settings = load(flags=[f"model={model}", "server.port=0", f"cache_dir={cache}"], environ={})
    preflight(settings)
    folder = resolve(str(model), cache, say=lambda _: None).path
    Tokens(str(folder)).encode("the quick fox")
    # Without kernels of our own, nothing is measured.
    return TransformersTarget(TargetConfig(model_path=str(folder), kv_cache_tokens=512, kernels="torch", threads=1))


def outcome(model: Path, cache: Path, what: str) -> str | None:
    """The refusal, or None where the model is served.

    Raises:
        AssertionError: any other outcome; says what was damaged.
    """
    try:
        target = serve(model, cache)
    except ConfigurationError as error:
        told = str(error)
        assert "\n" not in told and 10 < len(told) < 700, f"{what}: {told}"
        return told
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert target.open("a", 64)
    served = target.forward([Rows(request_id="a", context=0, tokens=TEXT, logits=len(TEXT))])[0]
    try:
        reference = theirs(model)
    except Exception as error:
        raise AssertionError(f"{what}: served, but transformers fails: {error}") from error
    assert torch.isfinite(served).all(), what
    assert torch.allclose(served, reference, rtol=1e-3, atol=2e-3), f"{what}: {(served - reference).abs().max()}"
    return None


def theirs(model: Path) -> torch.Tensor:
    """What transformers computes."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(model)}
    if model.is_file():
        source = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
        source["quantization_config"] = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager")
    made: torch.Tensor = loaded(torch.tensor([TEXT])).logits[0].detach()
    return made


# One batch is quick enough to be run always.
@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.exhaustive] if first else []) for first in range(0, FOLDERS, BATCH)]
)
def test_damaged_folders_are_refused_or_work(first: int, tiny_model: Path, tmp_path: Path) -> None:
    refused = 0
    for seed in range(first, first + BATCH):
        folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
        what = f"seed {seed}, {damage(folder, seed)}"
        refused += outcome(folder, tmp_path / "cache", what) is not None
        shutil.rmtree(folder)
    # Neither everything nor nothing.
    assert BATCH // 4 < refused < BATCH


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = {"attn_norm": "F32", "ffn_norm": "F32", "attn_q": "Q4_1", "ffn": "Q8_0", "token_embd": "Q4_0"}
    return make_tiny_gguf(tmp_path_factory.mktemp("gguf"), kinds)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, FILES, BATCH))
def test_damaged_gguf_files_are_refused_or_work(first: int, tiny_gguf: Path, tmp_path: Path) -> None:
    refused = 0
    for seed in range(first, first + BATCH):
        # A name of its own: what is unpacked is kept by name, size and time.
        file = Path(shutil.copy(tiny_gguf, tmp_path / f"tiny-{seed}.gguf"))
        what = f"seed {seed}, {damage_gguf(file, seed)}"
        refused += outcome(file, tmp_path / "cache", what) is not None
    assert BATCH // 4 < refused < BATCH
