"""Reads what makes P-EAGLE of an EAGLE-3 head: a mask token, a state for it, and how many tokens it guesses at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.files.head_fields import HeadFields, Shapes, refused_tensor
from speculation import limits

# Names of its mask token: the speculators library's and vLLM's.
_MASKS = ("mask_token_id", "ptd_token_id", "pard_token")
# Tokens that it guesses at once where nobody says: as many as its authors train.
_AT_ONCE = 8


def is_parallel(config: Mapping[str, Any]) -> bool:
    """Whether a head of EAGLE-3's tensors is one of P-EAGLE, by its config.json."""
    named = any(config.get(name) is not None for name in _MASKS)
    return named or config.get("parallel_drafting") is True or config.get("speculators_model_type") == "peagle"


def with_masks(head: HeadConfig, config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig:
    """``head`` with what P-EAGLE adds, if it is one.

    Args:
        shapes: of its tensors, by canonical name.
        where: the checkpoint, for errors.

    Raises:
        ConfigurationError: the mask token is none of the target's, its state is missing, or a tree cannot be so deep.
    """
    if head.family != "eagle3" or not is_parallel(config):
        return head
    fields, last = HeadFields.of(config, where), head.vocab_size - 1
    token = next((each for name in _MASKS if (each := config.get(name)) is not None), None)
    if type(token) is not int or not 0 <= token <= last:
        raise fields.refuse("mask_token_id", token, f"a token of the target, from 0 to {last}")
    if "missing_state" not in shapes:
        raise refused_tensor(where, "mask_hidden", "missing", "P-EAGLE needs it beside its mask token")
    levels, most = _levels(fields), limits.MAX_TREE_NODES
    if type(levels) is not int or not 1 <= levels <= most:
        raise fields.refuse("speculative_tokens", levels, f"from 1 to {most}, the most nodes of a tree")
    return replace(head, mask_token_id=token, levels=levels)


def _levels(fields: HeadFields) -> Any:
    said = fields.fields.get("speculators_config")
    methods = said.get("proposal_methods") if isinstance(said, Mapping) else None
    if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) and "speculative_tokens" in methods[0]:
        return methods[0]["speculative_tokens"]
    return fields.number("num_depths" if fields.fields.get("para_depths") is None else "para_depths", _AT_ONCE)
