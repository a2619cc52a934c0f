"""Untrained heads of hidden states for tests, written beside a tiny target's folder as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from services.drafter.heads.blocks.config import BlockConfig
from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.canary.texts import TEXTS, CanaryText, save_texts
from services.drafter.heads.draft_vocabulary import SharedOutput
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_config import head_for
from services.drafter.heads.files.target_rows import read_target_rows, read_target_shape
from services.drafter.heads.medusa.config import MedusaConfig
from services.drafter.heads.medusa.files import save_medusa
from services.drafter.heads.medusa.heads import MedusaHeads
from services.drafter.heads.streams.config import StreamsConfig
from services.drafter.heads.streams.files import new_streams, save_streams
from tests.tiny_models.lora import ALL, make_adapter
from tests.tiny_models.mtp_layers import alone
from training.head_writing import public_fields, save_head

FAMILIES: tuple[Literal["eagle", "fspad", "eagle3"], ...] = ("eagle", "fspad", "eagle3")
# Those that guess several tokens ahead at once.
AHEAD = ("streaming", "medusa", "peagle", "dflash", "uno")
MODELS = (*FAMILIES, "mtp", *AHEAD)
# What stands for streams that the target, of two layers, computes in its own pass; alone, and beside what the two-step form
# reads.
IN_PASS = (2, 3, 4)
STREAM_FORMS = (IN_PASS, (0, *IN_PASS))
# The hidden states that they read, of a target of two layers.
LAYERS: dict[str, tuple[int, ...]] = {
    "eagle": (-1,),
    "fspad": (-1,),
    "eagle3": (0, 1),
    "mtp": (-1,),
    "streaming": (0,),
    "medusa": (-1,),
    "peagle": (0, 1),
    "dflash": (0, -1),
    "uno": (),
}


def make_head(target: Path, folder: Path, family: Literal["eagle", "fspad", "eagle3"]) -> Path:
    """Write a head for the target, which copies the state that it is given and so is right now and then."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(2)
        config = head_for(read_target_shape(target), family, state_layers=LAYERS[family])
        head = FeatureHead(config, read_target_rows(target))
        save_head(head, folder, {}, target_layers=read_target_shape(target).num_layers, dtype=torch.float32)
    return folder


def make_peagle(target: Path, folder: Path) -> Path:
    """Write a head that guesses four tokens at once."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(7)
        config = head_for(read_target_shape(target), "eagle3", state_layers=LAYERS["peagle"])
        head = FeatureHead(config, read_target_rows(target))
        torch.nn.init.normal_(head.missing_state)
        save_head(head, folder, {}, target_layers=read_target_shape(target).num_layers, dtype=torch.float32)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"mask_token_id": 300, "num_depths": 4}))
    return folder


def make_streams(target: Path, folder: Path, *, layers: int = 1, streams: int = 3, pruning_rank: int = 0) -> Path:
    """Write streams for the target with disturbed adapters."""
    if not (folder / "config.json").is_file():
        generator = torch.Generator().manual_seed(4)
        shape = read_target_shape(target)
        config = StreamsConfig(
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            draft_vocab_size=shape.vocab_size,
            num_streams=streams,
            num_layers=layers,
            target_layers=shape.num_layers,
            rank=4,
            alpha=6.0,
            pruning_rank=pruning_rank,
        )
        made = new_streams(config, target, shape, shared_output(target), generator)
        with torch.no_grad():
            for _, parameter in made.trained():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        save_streams(made, folder, {}, dtype=torch.float32)
    return folder


def make_medusa(target: Path, folder: Path, *, own_output: bool = False, blocks: int = 1) -> Path:
    """Write three heads for the target."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(5)
        shape = read_target_shape(target)
        config = MedusaConfig(
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            draft_vocab_size=shape.vocab_size,
            num_heads=3,
            num_blocks=blocks,
            num_outputs=3 * own_output,
        )
        save_medusa(MedusaHeads(config, shared_output(target)), folder, {}, dtype=torch.float32)
    return folder


# What a block drafter has beside DFlash's: the flags of what it computes, and what else its file says of them.
BLOCK_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DFlash": ({}, {}),
    "DSpark": ({"markov_rank": 4, "confidence": True, "confidence_with_markov": True}, {}),
    "DFlash2": (
        {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 3, "conv_group_size": 16},
        {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 3, "conv_group_size": 16},
    ),
    "Domino": (
        {"gru_size": 10, "gru_inner_size": 6, "gru_from": 1},
        {"projector_type": "domino", "gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1, "shift_label": True},
    ),
    "JetSpec": ({"causal": (True,)}, {"causal_head": True}),
}


def make_blocks(
    target: Path, folder: Path, layers: tuple[int, ...] = (0, -1), *, from_anchor: bool = False, kind: str = "DFlash"
) -> Path:
    """Write a block drafter for the target, of one layer and four tokens ahead, which reads these of its layers.

    Args:
        kind: of ``BLOCK_KINDS``.
    """
    if not (folder / "config.json").is_file():
        torch.manual_seed(6)
        shape = read_target_shape(target)
        flags, said = BLOCK_KINDS[kind]
        config = BlockConfig(
            layer=head_for(shape, "dflash", state_layers=layers, qk_norm=True, input_norm=True),
            block_size=4 if from_anchor else 5,
            mask_token_id=300,
            **{"causal": (False,), "windows": (None,), **flags},
        )
        drafter = BlockDrafter(config, read_target_rows(target))
        for name, parameter in drafter.named_parameters():
            if name.endswith(("base_kernel", "codebook")):
                torch.nn.init.normal_(parameter, std=0.5)
        own = {"mask_token_id": 300, "target_layer_ids": [each % shape.num_layers for each in layers], **said}
        fields = {"block_size": config.block_size, "dflash_config": own, "sample_from_anchor": from_anchor}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(drafter.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(public_fields(config.layer) | fields))
    return folder


def make_uno(target: Path, folder: Path) -> Path:
    """Write an adapter of random numbers for the target's rows of noise."""
    if not (folder / "adapter_config.json").is_file():
        of_attention = [name for name in ALL if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))]
        # Not all rows go through an expert.
        dense = read_target_shape(target).config["model_type"] == "llama"
        make_adapter(folder, target, seed=8, targets=ALL if dense else of_attention, size=0.1)
    return folder


def shared_output(target: Path) -> SharedOutput:
    """The whole output layer of a target."""
    rows = read_target_rows(target)
    return SharedOutput(rows, torch.arange(rows.output.shape[0]))


def make_useless_head(target: Path, folder: Path) -> Path:
    """Write a head with a canary's texts, of which it guesses next to nothing: the target never wrote them."""
    make_head(target, folder, "eagle")
    shape = read_target_shape(target)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(shape.vocab_size, (200,), generator=generator)
    states = {layer: torch.randn(200, shape.hidden_size, generator=generator) for layer in (0, -1)}
    save_texts([CanaryText(tokens=tokens, answer=8, states=states)], folder / TEXTS)
    return folder


def heads_beside(target: Path) -> dict[str, Path]:
    """A checkpoint of each kind in a folder beside the target's, made once."""
    folders = {name: target.parent / f"{target.name}-{name}" for name in MODELS}
    made: dict[str, Path] = {family: make_head(target, folders[family], family) for family in FAMILIES}
    made["mtp"] = alone(target, folders["mtp"])
    made["medusa"] = make_medusa(target, folders["medusa"])
    made["peagle"] = make_peagle(target, folders["peagle"])
    made["dflash"] = make_blocks(target, folders["dflash"])
    made["uno"] = make_uno(target, folders["uno"])
    if read_target_shape(target).config["model_type"] == "llama":
        # There are no streams through layers of experts.
        made["streaming"] = make_streams(target, folders["streaming"], pruning_rank=2)
    return made
