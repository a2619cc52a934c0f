"""Reads what later drafters add to DFlash's block: heads of DSpark and Domino on its rows, and DFlash2's parts."""

from __future__ import annotations

from typing import Any

from services.drafter.heads.files.head_fields import HeadFields, Shapes

_OF_DSPARK = ("markov_head.", "confidence_head.")


def guesses_from_anchor(fields: HeadFields, shapes: Shapes) -> bool:
    """Whether the last token's row guesses, too: in DSpark unless it says otherwise, and with shifted labels (Domino)."""
    if fields.flag("shift_label"):
        return True
    said = fields.flag("sample_from_anchor")
    return any(name.startswith(_OF_DSPARK) for name in shapes) if said is None else said


def markov_fields(fields: HeadFields, shapes: Shapes) -> dict[str, Any]:
    """DSpark's part of ``BlockConfig``.

    Raises:
        ConfigurationError: a field contradicts the tensors.
    """
    rank = _as_held(fields, "markov_rank", shapes.get("markov_head.markov_w1.weight", (0, 0))[-1])
    shown = {"gate_proj": "gated", "joint_proj": "rnn"}
    found = next((kind for name, kind in shown.items() if f"markov_head.{name}.weight" in shapes), "vanilla")
    kind = fields.fields.get("markov_head_type")
    if rank and kind not in (None, found):
        raise fields.refuse("markov_head_type", kind, f"{found}, as the tensors say")
    confidence = fields.shown_by("confidence_head.proj.weight", shapes, "enable_confidence_head")
    with_markov = confidence and fields.flag("confidence_head_with_markov") is not False and rank > 0
    return {
        "markov_rank": rank,
        "markov_kind": found,
        "confidence": confidence,
        "confidence_with_markov": with_markov,
    }


def gru_fields(fields: HeadFields, shapes: Shapes) -> dict[str, Any]:
    """Domino's part of ``BlockConfig``. Its sizes may stand in other configurations, too, where nothing has them.

    Raises:
        ConfigurationError: a field contradicts the tensors, or they are missing.
    """
    size = shapes.get("prefix_gru.weight_hh_l0", (0, 0))[-1]
    if fields.fields.get("projector_type") != "domino" and not size:
        return {}
    inner = shapes.get("embed_proj.0.weight", (0,))[0]
    for name, held in (("gru_hidden_dim", size), ("emb_dim", inner)):
        if not held or fields.number(name, held) != held:
            raise fields.refuse(name, fields.fields.get(name), f"{held}, as the tensors say")
    first = fields.fields.get("pure_draft_prefix_len")
    # The speculators library's default differs from the others'.
    first = int("speculators_model_type" in fields.fields) if first is None else first
    if type(first) is not int or first < 0:
        raise fields.refuse("pure_draft_prefix_len", first, "a whole number, 0 or more")
    return {"gru_size": size, "gru_inner_size": inner, "gru_from": first}


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
