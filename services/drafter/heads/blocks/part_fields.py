"""Reads what later drafters add to DFlash's block: DSpark's heads on its rows, DFlash2's selector and convolutions."""

from __future__ import annotations

from typing import Any

from services.drafter.heads.files.head_fields import HeadFields, Shapes

_OF_DSPARK = ("markov_head.", "confidence_head.")


def guesses_from_anchor(fields: HeadFields, shapes: Shapes) -> bool:
    """Whether the last token's row guesses, too: in DSpark, unless it says otherwise."""
    said = fields.flag("sample_from_anchor")
    return any(name.startswith(_OF_DSPARK) for name in shapes) if said is None else said


def markov_fields(fields: HeadFields, shapes: Shapes) -> dict[str, Any]:
    """DSpark's part of ``BlockConfig``.

    Raises:
        ConfigurationError: a field contradicts the tensors.
    """
    rank = _as_held(fields, "markov_rank", shapes.get("markov_head.markov_w1.weight", (0, 0))[-1])
    kind, gated = fields.fields.get("markov_head_type"), "markov_head.gate_proj.weight" in shapes
    if rank and kind not in (None, "gated" if gated else "vanilla"):
        raise fields.refuse("markov_head_type", kind, "gated, as the tensors say" if gated else "vanilla or gated")
    confidence = fields.shown_by("confidence_head.proj.weight", shapes, "enable_confidence_head")
    with_markov = confidence and fields.flag("confidence_head_with_markov") is not False and rank > 0
    return {
        "markov_rank": rank,
        "markov_gated": gated,
        "confidence": confidence,
        "confidence_with_markov": with_markov,
    }


def selector_fields(fields: HeadFields, shapes: Shapes) -> dict[str, Any]:
    """DFlash2's selector as a part of ``BlockConfig``.

    Raises:
        ConfigurationError: a field contradicts the tensors, or it selects from a cut vocabulary.
    """
    rank = _as_held(fields, "selector_rank", shapes.get("candidate_selector.hidden_projection.weight", (0,))[0])
    if not rank:
        return {}
    size = shapes.get("candidate_selector.successor_codebook", (0,))[0]
    if (drafted := fields.number("draft_vocab_size", size)) != size:
        raise fields.refuse("draft_vocab_size", drafted, f"{size}, as many tokens as the selector knows")
    return {"selector_rank": rank, "selector_top_k": fields.number("selector_top_k")}


def convolution_fields(fields: HeadFields, shapes: Shapes) -> dict[str, Any]:
    """DFlash2's convolutions as a part of ``BlockConfig``.

    Raises:
        ConfigurationError: a field contradicts the tensors.
    """
    kernel = shapes.get("layers.0.attention_conv.base_kernel", (0, 0))
    size = _as_held(fields, "conv_kernel_size", kernel[1])
    if not size:
        return {}
    group = fields.number("conv_group_size")
    if kernel[-1] % group:
        raise fields.refuse("conv_group_size", group, f"a divisor of the hidden size, {kernel[-1]}")
    return {"conv_kernel_size": size, "conv_group_size": group}


def _as_held(fields: HeadFields, name: str, held: int) -> int:
    """A size that the tensors show; 0: there are none."""
    said = fields.fields.get(name)
    if said not in (None, 0) and fields.number(name) != held:
        raise fields.refuse(name, said, f"{held}, as the tensors say")
    return held
