"""Public layouts of head checkpoints: told apart by their tensors, renamed to the module's names and back.

``FeatureHead``'s parameter names are the canonical ones. What belongs to no module is called ``DRAFT_OFFSETS`` (EAGLE's
``d2t``), ``DRAFT_IDS`` (vLLM's ``token_map``) and ``DRAFTED`` (``t2d``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.drafter.heads.files.head_config import Family
from speculation.errors import ConfigurationError

DRAFT_OFFSETS, DRAFT_IDS, DRAFTED = "d2t", "token_map", "t2d"
_MAPS = (
    ("d2t", DRAFT_OFFSETS),
    ("t2d", DRAFTED),
    ("mask_hidden", "missing_state"),
    ("norm.", "norm."),
    ("embed_tokens.", "embed_tokens."),
    ("lm_head.", "lm_head."),
)
# Endings of saved tables that follow from the configuration.
COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
# Older spellings; read, never written.
_MAP_ALIASES = (("draft_id_to_target_id", DRAFT_OFFSETS), ("token_map", DRAFT_IDS))
_CONNECTOR_ALIASES = (
    ("fusion_fc.", "connector.fc."),
    ("embedding_layernorm.", "connector.embed_norm."),
    ("embed_layernorm.", "connector.embed_norm."),
    ("hidden_layernorm.", "layers.0.input_layernorm."),
    ("lm_head_layernorm.", "norm."),
    ("pre_lm_head_layernorm.", "norm."),
)
_FUSED = (("fc.", "fc."), ("fc_norm.", "fc_norm."), ("input_norm.", "states_norm."))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayout:
    """One way to name a head's tensors.

    Attributes:
        names: prefixes of public names with their canonical ones; the first that fits is taken, in both directions.
        aliases: further public prefixes that are read.
    """

    name: str
    family: Family
    names: tuple[tuple[str, str], ...]
    aliases: tuple[tuple[str, str], ...] = _MAP_ALIASES

    def canonical(self, public: str) -> str | None:
        """The canonical name; None if this layout has no such tensor."""
        for prefix, own in (*self.names, *self.aliases):
            if public.startswith(prefix):
                return own + public.removeprefix(prefix)
        return None

    def public(self, canonical: str) -> str:
        """The name in this layout."""
        return next(public + canonical.removeprefix(own) for public, own in self.names if canonical.startswith(own))


EAGLE = HeadLayout(
    name="eagle",
    family="eagle",
    names=(
        ("fc.", "connector.fc."),
        ("enorm.", "connector.embed_norm."),
        ("hnorm.", "connector.state_norm."),
        ("layers.", "layers."),
        *_MAPS,
    ),
    aliases=(*_MAP_ALIASES, *_CONNECTOR_ALIASES),
)
FSPAD = HeadLayout(
    name="fspad",
    family="fspad",
    names=(
        ("fc.fc.", "connector.fc."),
        ("fc.mlp.", "connector.mlp."),
        ("fc.post_attention_layernorm.", "connector.norm."),
        ("layers.", "layers."),
        *_MAPS,
    ),
)
EAGLE3 = HeadLayout(
    name="eagle3",
    family="eagle3",
    names=(("midlayer.", "layers.0."), ("layers.", "layers."), *_FUSED, *_MAPS),
)
SPECULATORS_EAGLE3 = HeadLayout(name="speculators", family="eagle3", names=(("layers.", "layers."), *_FUSED, *_MAPS))
SPECULATORS_EAGLE = HeadLayout(
    name="speculators_eagle",
    family="eagle",
    names=(
        ("fusion_fc.", "connector.fc."),
        ("embedding_layernorm.", "connector.embed_norm."),
        ("pre_lm_head_layernorm.", "norm."),
        ("transformer.", "layers.0."),
        *_MAPS[:3],
        *_MAPS[4:],
    ),
)
LAYOUTS = {each.name: each for each in (EAGLE, FSPAD, EAGLE3, SPECULATORS_EAGLE3, SPECULATORS_EAGLE)}

_NOT_YET = "drafters of this kind are not supported yet; use an EAGLE, EAGLE-3, P-EAGLE, HASS, FSPAD or DFlash head"
_ODD_MEDUSA = "its tensors must be named as its authors (0.0.linear.weight) or vLLM (blocks.0.layers.0.weight) name them"
_ODD_BLOCK = "its tensors must be named as its authors name them (fc.weight, hidden_norm.weight, layers.0.self_attn...)"
_ODD = {
    "Gemma 4 assistant": "it is no head of EAGLE's family, but drafts as mtp",
    "LiLiCorr": "its head, which scores pairs of candidates, is not supported yet; DFlash and DFlash2 are",
    "Medusa": _ODD_MEDUSA,
    "DFlash": _ODD_BLOCK,
    "DFlash2": _ODD_BLOCK,
    "DSpark": _ODD_BLOCK,
    "Domino": _ODD_BLOCK,
    "speculators independent": "it must be the draft model's own folder",
    "P-EAGLE": "its tensors must be EAGLE-3's (midlayer.self_attn... or layers.0.hidden_norm.weight)",
}
# Configurations of other drafters: field, and what it means.
_OTHERS = {
    "dflash_config": "DFlash",
    "medusa_num_heads": "Medusa",
    "markov_rank": "DSpark",
    "mask_token_id": "P-EAGLE",
    "ptd_token_id": "P-EAGLE",
    "parallel_drafting": "P-EAGLE",
    "pard2": "PARD-2",
    "pard2_target_layers": "PARD-2",
    "pard_token": "PARD",
}
# Kinds that EAGLE-3's tensors may be, too; vLLM gives both one field.
PARALLEL = ("P-EAGLE", "PARD")
_NAMED = {
    "gemma4assistant": "Gemma 4 assistant",
    "gemma4unifiedassistant": "Gemma 4 assistant",
    "lilicorr": "LiLiCorr",
    "pard2": "PARD-2",
    "peagle": "P-EAGLE",
    "dflash2": "DFlash2",
    "dflash": "DFlash",
    "domino": "Domino",
    "dspark": "DSpark",
    "mlp": "speculators mlp",
    "independent": "speculators independent",
    "medusa": "Medusa",
}


def detect(names: Iterable[str], config: Mapping[str, Any], where: str) -> HeadLayout:
    """The layout of a checkpoint, by its tensors (see ``stripped``) first.

    Args:
        where: the checkpoint, for the error.

    Raises:
        ConfigurationError: it is something else; says what.
    """
    refuse_others(config, where, *PARALLEL)
    layout = _by_tensors(set(names), where)
    if layout.family != "eagle3" and kind_said(config) in PARALLEL:
        raise ConfigurationError(f"{where} is a P-EAGLE checkpoint: {_ODD['P-EAGLE']}", about=where)
    return layout


def _by_tensors(held: set[str], where: str) -> HeadLayout:
    if any(name.startswith("fc.fc.") for name in held):
        return FSPAD
    if any(name.startswith("midlayer.") for name in held):
        return EAGLE3
    if "layers.0.hidden_norm.weight" in held:
        return SPECULATORS_EAGLE3
    if any(name.startswith("transformer.") for name in held) and "fusion_fc.weight" in held:
        return SPECULATORS_EAGLE
    if held & {"fc.weight", "fusion_fc.weight"} and any(name.startswith("layers.0.") for name in held):
        return EAGLE
    if any(name.startswith(("blocks.", "medusa_heads.")) or name.endswith(".0.linear.weight") for name in held):
        raise ConfigurationError(f"{where} is a Medusa checkpoint: {_ODD_MEDUSA}", about=where)
    if any(name.startswith("layers.0.self_attn.") for name in held):
        raise ConfigurationError(
            f"{where} has no fc.weight: it is a language model, not a head of hidden states; name it as draft_model",
            about=where,
        )
    shown = ", ".join(sorted(held)[:4])
    raise ConfigurationError(
        f"{where} is no head of a known layout ({', '.join(LAYOUTS)}): it holds {shown}, ...", about=where
    )


def refuse_others(config: Mapping[str, Any], where: str, *expected: str) -> None:
    """Refuse, by name, checkpoints of drafters that are not what their tensors say.

    Args:
        expected: what it may call itself; nothing at all is allowed, too.

    Raises:
        ConfigurationError: config.json says that it is something else.
    """
    found = kind_said(config)
    if found is not None and found not in expected:
        raise refused_kind(found, where)


def refused_kind(kind: str, where: str) -> ConfigurationError:
    """The error for a checkpoint of a kind that cannot be served."""
    return ConfigurationError(f"{where} is a {kind} checkpoint: {_ODD.get(kind, _NOT_YET)}", about=where)


def kind_said(config: Mapping[str, Any]) -> str | None:
    """What kind of drafter config.json says that it is; None: it says nothing, as EAGLE's do."""
    architectures = " ".join(map(str, config.get("architectures") or ())).lower()
    return (
        _NAMED.get(str(config.get("speculators_model_type") or config.get("spd_type") or ""))
        or next((kind for word, kind in _NAMED.items() if word in architectures and word != "mlp"), None)
        or next((kind for field, kind in _OTHERS.items() if config.get(field) not in (None, False)), None)
    )


def stripped(name: str) -> str:
    """``name`` without the prefixes under which engines nest a head."""
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name
