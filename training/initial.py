"""What a new model starts from: noise, a head that passes states on, and layers taken from the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.drafter.heads.blocks.config import BlockConfig
from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_config import TargetShape, head_for
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.layer import HeadLayer
from services.model_files.weights.files import WeightFiles
from speculation.errors import ConfigurationError
from training.recipe import BlockRecipe, Eagle3Recipe, HeadRecipe

_SPREAD = 0.02
# The target's last layer adds to a residual stream that is many times as large as the state behind the final norm.
_WRITTEN = 0.1


def new_head(recipe: HeadRecipe, shape: TargetShape, rows: TargetRows, draft_ids: torch.Tensor, target: Path) -> FeatureHead:
    """An untrained head: ``fc`` is [0 | I] and a little noise, so that step 0 passes the state on.

    Raises:
        ConfigurationError: the recipe wants the target's last layer, and it has not the names and sizes of a Llama's.
    """
    flags: dict[str, Any] = {} if recipe.intermediate_size is None else {"intermediate_size": recipe.intermediate_size}
    fspad = recipe.sampler or recipe.partial_alignment
    config = head_for(
        shape,
        "fspad" if fspad else "eagle",
        draft_vocab_size=len(draft_ids),
        sampler=recipe.sampler,
        two_outputs=recipe.partial_alignment,
        # vLLM's EAGLE has none, and would leave it out without a word.
        fc_bias=fspad,
        **flags,
    )
    head = FeatureHead(config, rows, draft_ids)
    fill_with_noise(head, recipe.seed)
    with torch.no_grad():
        connector = head.connector
        assert connector is not None
        size = config.hidden_size
        connector.fc.weight.mul_(0.1)
        connector.fc.weight[:, -size:] += torch.eye(size)
        if recipe.layer == "last":
            _copy_last_layer(head.layers[0], shape, target)
    return head


def new_eagle3_head(
    recipe: Eagle3Recipe, shape: TargetShape, rows: TargetRows, draft_ids: torch.Tensor, layers: tuple[int, ...]
) -> FeatureHead:
    """An untrained head of EAGLE-3, whose output layer begins as the target's rows.

    Args:
        layers: whose states it reads.

    Raises:
        ConfigurationError: the target has not the sizes of a Llama's layer.
    """
    flags: dict[str, Any] = {} if recipe.intermediate_size is None else {"intermediate_size": recipe.intermediate_size}
    head = FeatureHead(
        head_for(shape, "eagle3", draft_vocab_size=len(draft_ids), state_layers=layers, **flags), rows, draft_ids
    )
    fill_with_noise(head, recipe.seed)
    assert head.lm_head is not None
    with torch.no_grad():
        head.lm_head.weight.copy_(rows.output.rows(draft_ids) * rows.scale)
    return head


def new_block_drafter(
    recipe: BlockRecipe,
    shape: TargetShape,
    rows: TargetRows,
    draft_ids: torch.Tensor,
    layers: tuple[int, ...],
    ends: Sequence[int],
) -> BlockDrafter:
    """An untrained block drafter. Where it has a head for the token before, nothing comes of that at first.

    Args:
        layers: whose states it reads.
        ends: tokens that end a turn; the first is the mask unless the recipe names one.

    Raises:
        ConfigurationError: the mask is no token, or the target has not the sizes of a Llama's layer.
    """
    mask = recipe.mask_token_id if recipe.mask_token_id is not None else next(iter(ends), 0)
    if mask >= shape.vocab_size:
        raise ConfigurationError(
            field="the recipe's mask_token_id",
            value=mask,
            allowed=f"from 0 to {shape.vocab_size - 1}, a token of the target",
        )
    flags: dict[str, Any] = {} if recipe.intermediate_size is None else {"intermediate_size": recipe.intermediate_size}
    layer = head_for(
        shape,
        "dflash",
        draft_vocab_size=len(draft_ids),
        state_layers=layers,
        num_layers=recipe.layers,
        qk_norm=True,
        input_norm=True,
        output_norm=True,
        fc_bias=False,
        **flags,
    )
    has_heads = recipe.markov_rank > 0
    config = BlockConfig(
        layer=layer,
        block_size=recipe.block_size,
        mask_token_id=mask,
        from_anchor=has_heads,
        causal=(recipe.causal,) * recipe.layers,
        windows=(None,) * recipe.layers,
        logit_scale=rows.scale,
        markov_rank=recipe.markov_rank,
        markov_kind=recipe.markov_head,
        confidence=has_heads,
        confidence_with_markov=has_heads,
    )
    drafter = BlockDrafter(config, rows, draft_ids)
    fill_with_noise(drafter, recipe.seed)
    if drafter.markov_head is None:
        return drafter
    with torch.no_grad():
        # Vectors of length 1, so that what follows from a token is learnt as fast as the rest.
        drafter.markov_head.markov_w1.weight.div_(_SPREAD * recipe.markov_rank**0.5)
        drafter.markov_head.markov_w2.weight.zero_()
    return drafter


def fill_with_noise(module: nn.Module, seed: int) -> None:
    """Small random matrices, biases of 0; norms stay as they are."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * _SPREAD)
            elif name.endswith("bias"):
                parameter.zero_()


def _copy_last_layer(layer: nn.Module, shape: TargetShape, target: Path) -> None:
    """Copy the target's last layer, as far as the sizes agree: a wider or narrower MLP keeps its noise.

    The head's layer 0 reads states behind the final norm without a norm of its own. So the last layer's input norm, divided
    by the final one, is folded into its projections.
    """
    assert isinstance(layer, HeadLayer)
    prefix = f"model.layers.{shape.num_layers - 1}."
    with WeightFiles(target) as files:

        def read(name: str) -> torch.Tensor:
            if name not in files:
                raise ConfigurationError(
                    field="the recipe's layer", value="last", given=f"but the target has no {name}", allowed="random"
                )
            return files.get(name).float()

        final = read("model.norm.weight")
        folded = read(f"{prefix}input_layernorm.weight") / torch.where(final.abs() < 1e-3, 1.0, final)
        attention, mlp = layer.self_attn, layer.mlp
        for name, into in (("q_proj", attention.q_proj), ("k_proj", attention.k_proj), ("v_proj", attention.v_proj)):
            _copy(into.weight, read(f"{prefix}self_attn.{name}.weight") * folded)
        written = final[:, None] * _WRITTEN
        _copy(attention.o_proj.weight, read(f"{prefix}self_attn.o_proj.weight") * written)
        _copy(layer.post_attention_layernorm.weight, read(f"{prefix}post_attention_layernorm.weight"))
        gate, up, down = (read(f"{prefix}mlp.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj"))
        if gate.shape == mlp.gate_proj.weight.shape:
            _copy(mlp.gate_proj.weight, gate)
            _copy(mlp.up_proj.weight, up)
            outputs = mlp.down_proj.weight.shape[0] // down.shape[0]
            _copy(mlp.down_proj.weight, torch.cat([down * written] * outputs))


def _copy(into: torch.Tensor, weight: torch.Tensor) -> None:
    if into.shape != weight.shape:
        raise ConfigurationError(
            field="the recipe's layer",
            value="last",
            given=(f"but the target's last layer has a weight {list(weight.shape)} where the head has {list(into.shape)}"),
            allowed="random",
        )
    into.copy_(weight)
