"""What is no draft model, or none that can draft here, is refused with its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM

from services.drafter.config import DrafterConfig
from services.drafter.draft_model.source import make
from speculation.errors import ConfigurationError
from tests.drafters.draft_model_sessions import VOCAB, refused
from tests.running.refusals import refuses


def changed(target: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    copy = Path(shutil.copytree(target, folder))
    change(copy)
    return copy


def test_folders_that_hold_no_draft_model_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="drafter.models", value="no weights of draft_model"):
        make(DrafterConfig())
    assert "trained.target is null" in refused(None, tiny_model)
    assert "must be a folder" in refused(tiny_model, tmp_path / "absent")

    def pickled(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    assert "pytorch_model.bin is a pickle" in refused(tiny_model, changed(tiny_model, tmp_path / "a", pickled))
    empty = changed(tiny_model, tmp_path / "b", lambda folder: (folder / "model.safetensors").unlink())
    assert "no *.safetensors" in refused(tiny_model, empty)
    (empty / "blocks.safetensors").touch()
    assert "blocks.safetensors is no safetensors file: it is empty" in refused(tiny_model, empty)
    without = changed(tiny_model, tmp_path / "c", lambda folder: (folder / "config.json").unlink())
    assert "config.json cannot be read" in refused(tiny_model, without)
    without = changed(tiny_model, tmp_path / "d", lambda folder: (folder / "tokenizer.json").unlink())
    assert "holds no tokenizer.json" in refused(tiny_model, without)
    assert "dtype" in refused(tiny_model, tiny_model, dtype="int4")
    assert "the device nowhere" in refused(tiny_model, tiny_model, device="nowhere")


def test_damaged_draft_models_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            found = load_file(folder / "model.safetensors")
            change(found)
            save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

        return apply

    name = "model.layers.0.mlp.up_proj.weight"

    def edited(case: str, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
        return refused(tiny_model, changed(tiny_model, tmp_path / case, weights(change)))

    assert f"hold no {name}" in edited("missing", lambda found: found.pop(name))
    assert "another shape" in edited("shape", lambda found: found.update({name: torch.zeros(3, 3)}))
    assert "has no place" in edited("extra", lambda found: found.update({"model.layers.9.x": torch.zeros(1)}))
    assert "infinite values or NaN" in edited("nan", lambda found: found[name].fill_(torch.nan))

    def other(folder: Path, **fields: object) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **fields}))

    copy = changed(tiny_model, tmp_path / "hidden", lambda folder: other(folder, hidden_size=32))
    assert "another shape" in refused(tiny_model, copy)
    copy = changed(tiny_model, tmp_path / "type", lambda folder: other(folder, model_type="no_such"))
    assert "no_such" in refused(tiny_model, copy)
    copy = changed(tiny_model, tmp_path / "cut", lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 9))
    assert "cannot load the draft model" in refused(tiny_model, copy)


def test_models_whose_state_cannot_be_rolled_back_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    def recurrent(folder: Path) -> None:
        torch.manual_seed(0)
        (folder / "model.safetensors").unlink()
        MambaForCausalLM(
            MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, initializer_range=0.4)
        ).save_pretrained(folder)

    assert "cannot draft with the model" in refused(tiny_model, changed(tiny_model, tmp_path / "m", recurrent))
