"""Writes a trained block drafter as others read it, too: in its authors' layout, or the speculators library's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from services.drafter.heads.blocks.config import BlockConfig
from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.files.head_config import FINAL
from services.drafter.heads.files.level_files import write_checkpoint
from training.head_writing import hidden_state_ids, public_fields

BlockLayout = Literal["authors", "speculators"]


def save_blocks(
    drafter: BlockDrafter,
    folder: Path,
    training: Mapping[str, Any],
    *,
    target_name: str,
    target_layers: int,
    layout: BlockLayout = "authors",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write model.safetensors, config.json and training.json to ``folder``; ``load_blocks`` makes the same drafter of them.

    The target's embeddings are left out; of its output rows, the speculators library's layout has those of the draft
    vocabulary.

    Args:
        drafter: with DSpark's heads, which makes it DSpark's, or without them, which makes it DFlash's.
        training: for training.json: how the drafter was made.
        target_layers: how many layers the target has.

    Raises:
        OSError: a file cannot be written.
    """
    tensors = {name: each.detach().to("cpu", dtype).contiguous() for name, each in drafter.state_dict().items()}
    fields = _fields(drafter.config) | {"target_hidden_size": drafter.config.layer.target_hidden_size}
    if layout == "speculators":
        tensors["lm_head.weight"] = drafter.vocabulary.rows.to("cpu", dtype).contiguous()
        config = fields | _speculators_fields(drafter.config, target_name, target_layers)
    else:
        config = public_fields(drafter.config.layer) | fields | _authors_fields(drafter.config, target_layers)
    write_checkpoint(folder, tensors, config, training, drafter.vocabulary.ids)


def _fields(config: BlockConfig) -> dict[str, Any]:
    """What both layouts say."""
    of_blocks = {
        "vocab_size": config.layer.vocab_size,
        "draft_vocab_size": config.layer.draft_vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.from_anchor,
        "is_causal": all(config.causal),
        "output_multiplier": config.logit_scale,
    }
    if not config.markov_rank:
        return of_blocks
    return of_blocks | {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


def _authors_fields(config: BlockConfig, target_layers: int) -> dict[str, Any]:
    """Layers count from 0; the last one stands for the state behind the final norm."""
    layers = [target_layers - 1 if layer == FINAL else layer for layer in config.layer.state_layers]
    common = {"model_type": "qwen3", "num_target_layers": target_layers}
    if not config.markov_rank:
        own = {"mask_token_id": config.mask_token_id, "target_layer_ids": layers}
        return {**common, "architectures": ["DFlashDraftModel"], "dflash_config": own}
    return {**common, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": layers}


def _speculators_fields(config: BlockConfig, target_name: str, target_layers: int) -> dict[str, Any]:
    kind, name = ("dspark", "DSparkSpeculator") if config.markov_rank else ("dflash", "DFlashSpeculator")
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.levels,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [name],
        "speculators_model_type": kind,
        "transformer_layer_config": public_fields(config.layer) | {"model_type": "qwen3"},
        "aux_hidden_state_layer_ids": hidden_state_ids(config.layer.state_layers, target_layers),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name},
        },
    }
