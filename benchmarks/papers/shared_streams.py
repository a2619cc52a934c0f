"""Streams whose adapters act on the target's own rows, too: a target that was tuned with them, as the paper has it.

They change what the target says, and whatever serves refuses them. For a row of the paper's table they are taken apart: the
adapters become a LoRA adapter, which the row's requests ask for, and the streams ones that leave the target alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.bench.records import Request
from benchmarks.papers.engine import Decoded, PaperEngine, RowDrafting, differs_at
from cluster.settings.config import Settings
from services.drafter.heads.files.head_files import CONFIG
from services.drafter.heads.files.target_shape import check_tokenizer
from services.drafter.heads.streams.config import FROZEN, KIND, SHARED
from services.drafter.heads.streams.files import StoredStreams, read_streams
from services.model_files.folder import read_json
from services.model_files.peft_config import CONFIG as ADAPTER_CONFIG
from services.model_files.peft_config import WEIGHTS as ADAPTER_WEIGHTS
from speculation.errors import ConfigurationError
from speculation.files import write_whole
from speculation.types import SamplingParams

ADAPTER = "tuned-with-streams"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStreams:
    """Such streams, taken apart.

    Attributes:
        folder: where they come from.
        streams, adapter: folders of the parts.
    """

    folder: Path
    streams: Path
    adapter: Path

    def settings(self, settings: Settings) -> Settings:
        """Settings of a target that has both."""
        drafter = settings.drafter.model_copy(update={"models": (self.streams,), "streaming_form": "one_pass"})
        verifier = settings.verifier.model_copy(update={"lora_modules": {ADAPTER: str(self.adapter)}})
        return settings.model_copy(update={"drafter": drafter, "verifier": verifier})


def is_shared(folder: Path) -> bool:
    """Whether a drafter's folder holds such streams."""
    if not (folder / CONFIG).is_file():
        return False
    config = read_json(folder / CONFIG, of="drafter")
    return config.get("model_type") == KIND and config.get("mode") == SHARED


def shared_streams(folders: Sequence[Path], target: Path, out: Path) -> SharedStreams | None:
    """The streams in the one folder, whose parts are written below ``out``; None: there is none.

    Raises:
        ConfigurationError: there are several, or they are another target's, or cannot be read.
    """
    if len(folders) > 1:
        raise ConfigurationError(
            "a target is tuned with the streams of one; leave out the others",
            field="--drafter",
            verb="names",
            value=", ".join(map(str, folders)),
        )
    if not folders:
        return None
    (folder,) = folders
    check_tokenizer(folder, target)
    streams, adapter = out / "streams", out / "adapter"
    for made in (streams, adapter):
        made.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and file.name != CONFIG:
            write_whole(streams / file.name, file.read_bytes())
    config = {**read_json(folder / CONFIG, of="drafter"), "mode": FROZEN}
    write_whole(streams / CONFIG, json.dumps(config, indent=2).encode())
    _write_adapter(read_streams(streams, target), adapter)
    return SharedStreams(folder=folder, streams=streams, adapter=adapter)


def _write_adapter(stored: StoredStreams, out: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    targets: set[str] = set()
    for layer, parts in enumerate(stored.adapters()):
        for name, (down, up) in parts.items():
            module = stored.last.names[f"layers.{layer}.{name}.weight"].removesuffix(".weight")
            tensors[f"base_model.model.{module}.lora_A.weight"] = down.contiguous()
            tensors[f"base_model.model.{module}.lora_B.weight"] = up.contiguous()
            targets.add(module)
    rank = stored.config.rank
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        # What is stored is scaled already.
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted(targets),
    }
    save_file(tensors, out / ADAPTER_WEIGHTS)
    write_whole(out / ADAPTER_CONFIG, json.dumps(config, indent=2).encode())


class TunedDecoder:
    """Implements ``RowDecoder`` by the tuned target, which is compared with itself, and counts the target's own answers.

    Attributes:
        equal: of each request that was answered plainly, whether the target without the adapter says the same.
    """

    def __init__(self, engine: PaperEngine) -> None:
        self._engine = engine
        self.equal: list[bool] = []

    def draft(self, drafting: RowDrafting) -> None:
        self._engine.draft(drafting)

    def answer(self, request: Request, params: SamplingParams, *, plainly: bool = False) -> Decoded:
        tuned = self._engine.answer(request, params, plainly=plainly, adapter=ADAPTER)
        if plainly:
            own = self._engine.answer(request, params, plainly=True)
            self.equal.append(differs_at(tuned.tokens, own.tokens) is None)
        return tuned
