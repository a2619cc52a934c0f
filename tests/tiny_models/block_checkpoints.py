"""Tiny checkpoints of block drafters in every public layout, and what they compute, written from the formulas alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.tiny_models.head_checkpoints import (
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    THETA,
    VOCABULARY,
    HeadCheckpoint,
    Tensors,
    decoder,
    gated,
    layer_config,
    normed,
    numbers,
)

BLOCK, DEPTH, MASK, RANK = 5, 2, 300, 6
# Of DFlash2: rows and neighbouring numbers that a convolution joins, and tokens that its selector chooses among.
KERNEL, GROUP, CANDIDATES = 3, 16, 5
# Of Domino: size of its state.
STATE = 10
# Layers of the target, as the authors number them: their outputs.
READ = [1, 3, 6]


def dflash(**changes: Any) -> HeadCheckpoint:
    """DFlash as its authors save it: neither embedding nor output layer."""
    tensors = {
        "fc.weight": numbers(HIDDEN, len(READ) * HIDDEN),
        "hidden_norm.weight": numbers(HIDDEN),
        "norm.weight": numbers(HIDDEN),
    }
    for number in range(DEPTH):
        prefix = f"layers.{number}."
        tensors |= decoder(prefix, HIDDEN)
        tensors |= {
            f"{prefix}input_layernorm.weight": numbers(HIDDEN),
            f"{prefix}self_attn.q_norm.weight": numbers(DIM),
            f"{prefix}self_attn.k_norm.weight": numbers(DIM),
        }
    config = layer_config(model_type="qwen3", num_hidden_layers=DEPTH, num_target_layers=LAYERS, block_size=BLOCK)
    config |= {
        "architectures": ["DFlashDraftModel"],
        "layer_types": ["full_attention"] * DEPTH,
        "sliding_window": None,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": READ},
    }
    return HeadCheckpoint({**config, **changes}, tensors)


def speculators_dflash(**changes: Any) -> HeadCheckpoint:
    """DFlash in the speculators library's layout: a draft vocabulary, and layers counted from one."""
    made = dflash()
    ids = torch.arange(48) * 6 + 3
    made.tensors |= {
        "lm_head.weight": numbers(48, HIDDEN),
        "d2t": ids - torch.arange(48),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids, True),
        "verifier_norm.weight": numbers(HIDDEN),
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": BLOCK - 1, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": layer_config(model_type="qwen3", num_hidden_layers=DEPTH),
        "draft_vocab_size": 48,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [each + 1 for each in READ],
        "mask_token_id": MASK,
        "sample_from_anchor": False,
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [proposal]},
    }
    return HeadCheckpoint({**config, **changes}, made.tensors)


def domino(**changes: Any) -> HeadCheckpoint:
    """Domino as SpecForge saves it: a recurrent cell over the tokens of the block corrects the rows."""
    made = dflash()
    made.tensors |= {
        "prefix_gru.weight_ih_l0": numbers(3 * STATE, HIDDEN),
        "prefix_gru.weight_hh_l0": numbers(3 * STATE, STATE),
        "embed_proj.0.weight": 3 * numbers(RANK, HIDDEN + STATE),
        "embed_proj.2.weight": 3 * numbers(VOCABULARY, RANK),
    }
    made.config["architectures"] = ["DominoDraftModel"]
    made.config["dflash_config"] = {
        **made.config["dflash_config"],
        "projector_type": "domino",
        "gru_hidden_dim": STATE,
        "emb_dim": RANK,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
        **changes,
    }
    return made


def dspark(*, kind: str = "vanilla", **changes: Any) -> HeadCheckpoint:
    """DSpark as its authors save it: fields at the top, embedding and output layer of its own, two heads on the rows."""
    made = dflash()
    reads = made.config.pop("dflash_config")
    made.tensors |= {
        "embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN),
        "lm_head.weight": numbers(VOCABULARY, HIDDEN),
        "markov_head.markov_w1.weight": torch.randn(VOCABULARY, RANK),
        "markov_head.markov_w2.weight": torch.randn(VOCABULARY, RANK),
        "confidence_head.proj.weight": numbers(1, HIDDEN + RANK),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    if kind == "gated":
        made.tensors["markov_head.gate_proj.weight"] = numbers(RANK, HIDDEN + RANK)
        made.tensors["markov_head.gate_proj.bias"] = torch.randn(RANK)
    if kind == "rnn":
        made.tensors["markov_head.joint_proj.weight"] = numbers(3 * RANK, HIDDEN + 2 * RANK)
        made.tensors["markov_head.joint_proj.bias"] = torch.randn(3 * RANK)
    own = {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": RANK,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return HeadCheckpoint({**made.config, **reads, **own, **changes}, made.tensors)


def dflash2(**changes: Any) -> HeadCheckpoint:
    """DFlash2 as its authors save it: convolutions in each layer, and a selector among a row's likeliest tokens."""
    made = dflash()
    for number in range(DEPTH):
        for conv in ("attention_conv", "mlp_conv"):
            made.tensors |= {
                f"layers.{number}.{conv}.base_kernel": torch.randn(2, KERNEL, HIDDEN),
                f"layers.{number}.{conv}.kernel_projection.weight": numbers(2 * KERNEL * (HIDDEN // GROUP), HIDDEN),
            }
    made.tensors |= {
        "candidate_selector.predecessor_codebook": torch.randn(VOCABULARY, RANK),
        "candidate_selector.successor_codebook": torch.randn(VOCABULARY, RANK),
        "candidate_selector.hidden_projection.weight": numbers(RANK, HIDDEN),
    }
    made.config["architectures"] = ["DFlash2DraftModel"]
    made.config["is_causal"] = False
    made.config["dflash_config"] = {
        **made.config["dflash_config"],
        "conv_kernel_size": KERNEL,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": CANDIDATES,
        **changes,
    }
    return made


def speculators_dspark(**changes: Any) -> HeadCheckpoint:
    """DSpark in the speculators library's layout, without a confidence head: a draft vocabulary, nothing said of anchors."""
    made = speculators_dflash()
    made.tensors["markov_head.markov_w1.weight"] = torch.randn(VOCABULARY, RANK)
    made.tensors["markov_head.markov_w2.weight"] = torch.randn(48, RANK)
    del made.config["sample_from_anchor"]
    own = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "markov_rank": RANK}
    return HeadCheckpoint({**made.config, **own, **changes}, made.tensors)


@dataclass(frozen=True, kw_only=True)
class Formula:
    """What a block drafter's flags say, for ``guesses``; each other value is a fault that must show."""

    theta: float = THETA
    # By layer.
    causal: tuple[bool, ...] = (False,) * DEPTH
    windows: tuple[int | None, ...] = (None,) * DEPTH
    shift: int = 0
    from_anchor: bool = False


def guesses(
    weights: Mapping[str, torch.Tensor],
    embeddings: torch.Tensor,
    states: Mapping[int, torch.Tensor],
    formula: Formula | None = None,
) -> torch.Tensor:
    """[levels, h], what the output layer reads: row by row and head by head, in float64.

    Args:
        embeddings: [BLOCK, h], of the last token and of masks.
        states: by position, [h * layers], those of positions before the last token's that are known.
    """
    formula = formula or Formula()
    last = max(states) + 1
    positions = [*sorted(states), *(last + formula.shift + row for row in range(BLOCK))]
    context = torch.stack([states[position] for position in sorted(states)])
    fused = normed(context @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    rows = embeddings
    for layer in range(DEPTH):
        prefix = f"layers.{layer}."
        given = normed(rows, weights[f"{prefix}input_layernorm.weight"])
        inner = _convolved(given, given, weights, f"{prefix}attention_conv.", 0)
        inner = _attended(inner, fused, positions, weights, layer, formula)
        rows = rows + _convolved(inner, given, weights, f"{prefix}attention_conv.", 1)
        given = normed(rows, weights[f"{prefix}post_attention_layernorm.weight"])
        inner = _convolved(given, given, weights, f"{prefix}mlp_conv.", 0)
        rows = rows + _convolved(gated(inner, inner, weights, f"{prefix}mlp."), given, weights, f"{prefix}mlp_conv.", 1)
    hidden = normed(rows, weights["norm.weight"])
    return hidden if formula.from_anchor else hidden[1:]


def _convolved(
    rows: torch.Tensor, given: torch.Tensor, weights: Mapping[str, torch.Tensor], prefix: str, which: int
) -> torch.Tensor:
    """DFlash2's convolution number ``which`` around a part, number by number; ``given`` is what came before the part."""
    if f"{prefix}base_kernel" not in weights:
        return rows
    base, groups = weights[f"{prefix}base_kernel"][which], HIDDEN // GROUP
    own = (given @ weights[f"{prefix}kernel_projection.weight"].T).view(len(rows), 2, KERNEL, groups)[:, which]
    made = torch.zeros_like(rows)
    for row in range(len(rows)):
        for back in range(min(KERNEL, row + 1)):
            for number in range(HIDDEN):
                made[row, number] += (base[back, number] + own[row, back, number // GROUP]) * rows[row - back, number]
    return made


def _attended(
    rows: torch.Tensor, fused: torch.Tensor, positions: list[int], weights: Tensors | Mapping[str, torch.Tensor], layer: int,
    formula: Formula,
) -> torch.Tensor:  # fmt: skip
    """Rows see the context and each other; keys and values are made of both by the same matrices."""
    prefix = f"layers.{layer}.self_attn."

    def turn(row: torch.Tensor, position: int) -> torch.Tensor:
        half = DIM // 2
        angles = position * formula.theta ** (-torch.arange(half, dtype=torch.float32).double() * 2 / DIM)
        first, second = row[:half], row[half:]
        return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))

    both = torch.cat((fused, rows))
    query, key, value = (
        rows @ weights[f"{prefix}q_proj.weight"].T,
        *(both @ weights[f"{prefix}{n}_proj.weight"].T for n in "kv"),
    )
    before, made = len(fused), torch.zeros(len(rows), HEADS * DIM, dtype=rows.dtype)
    for head in range(HEADS):
        own, shared = (slice(at * DIM, (at + 1) * DIM) for at in (head, head // (HEADS // GROUPS)))
        for at in range(len(rows)):
            place = positions[before + at]
            asked = turn(normed(query[at, own], weights[f"{prefix}q_norm.weight"]), place)
            seen = [
                index
                for index, other in enumerate(positions)
                if not (formula.causal[layer] and other > place)
                and ((window := formula.windows[layer]) is None or abs(other - place) < window)
            ]
            keys = [turn(normed(key[each, shared], weights[f"{prefix}k_norm.weight"]), positions[each]) for each in seen]
            scores = torch.stack(keys) @ asked / math.sqrt(DIM)
            made[at, own] = torch.softmax(scores, 0) @ value[seen, shared]
    return made @ weights[f"{prefix}o_proj.weight"].T
