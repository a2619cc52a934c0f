"""Multi-token prediction (MTP) layers among a checkpoint's tensors: public layouts, told apart by names alone.

Such a layer guesses the token after the next from the embedding of the next one and the target's state before it. Most
checkpoints hold it beside the model's own layers; some folders hold nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

# The matrix that joins embedding and state, by its canonical name: every layout has it.
JOIN = "fc.weight"
# Under which prefixes engines nest a model.
_NESTED = r"(?:model\.|language_model\.)*"


@dataclass(frozen=True, kw_only=True)
class MtpLayout:
    """One way to name the tensors of MTP layers.

    Attributes:
        names: beginnings of public names, ``#`` for the layer's number, with their canonical ones; the first that fits is
            taken. Canonical are ``embed_norm.``, ``state_norm.``, ``fc.``, ``norm.``, ``block.`` (the decoder layer), and
            ``embed_tokens.`` and ``lm_head.``, which are copies of the target's.
        state_first: whether ``fc`` reads the state before the embedding.
        chained: whether a layer reads what the one before it made. Otherwise all read the target's state of one position.
            None: no checkpoint with several layers is known.
    """

    name: str
    names: tuple[tuple[str, str], ...]
    state_first: bool = False
    chained: bool | None = None

    def canonical(self, public: str) -> tuple[int | None, str] | None:
        """The layer's number (None: all layers share the tensor) and the canonical name; None: it is no MTP layer's."""
        for pattern, own in self._patterns:
            if (found := pattern.match(public)) is not None:
                return int(found[1]) if pattern.groups else None, own + public[found.end() :]
        return None

    @property
    def normed(self) -> bool:
        """Whether there is a norm before the output layer."""
        return any(own == "norm." for _, own in self.names)

    @cached_property
    def _patterns(self) -> tuple[tuple[re.Pattern[str], str], ...]:
        return tuple((re.compile(_NESTED + re.escape(public).replace(r"\#", r"(\d+)")), own) for public, own in self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayerTensors:
    """One MTP layer of a checkpoint.

    Attributes:
        number: as its names count it.
        names: its canonical names, with those in the checkpoint; of what all layers share, too.
    """

    layout: MtpLayout
    number: int
    names: Mapping[str, str]

    def public(self, canonical: str) -> str:
        """The name that a tensor has, or would have, in the checkpoint."""
        if canonical in self.names:
            return self.names[canonical]
        public, own = next(each for each in self.layout.names if canonical.startswith(each[1]))
        nested = re.match(_NESTED, next(iter(self.names.values())))
        prefix = nested[0] if nested is not None else ""
        return prefix + public.replace("#", str(self.number)) + canonical.removeprefix(own)


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpTensors:
    """The MTP layers of a checkpoint.

    Attributes:
        layers: by ascending number: the first guesses the token after the next, each further one the token behind.
        every: the names of all MTP layers' tensors in the checkpoint.
    """

    layout: MtpLayout
    layers: tuple[MtpLayerTensors, ...]
    every: frozenset[str]


_LAYOUTS = (
    # DeepSeek V3, GLM-4.5, Step 3.5 and their kind: numbered on behind the model's own layers.
    MtpLayout(
        name="deepseek",
        names=(
            ("layers.#.enorm.", "embed_norm."),
            ("layers.#.hnorm.", "state_norm."),
            ("layers.#.eh_proj.", "fc."),
            ("layers.#.shared_head.norm.", "norm."),
            ("layers.#.shared_head.head.", "lm_head."),
            ("layers.#.embed_tokens.", "embed_tokens."),
            ("layers.#.", "block."),
        ),
        chained=True,
    ),
    # MiMo-7B and FastMTP. The speculators library has the same names, and reads the embedding first.
    MtpLayout(
        name="mimo",
        names=(
            ("mtp_layers.#.token_layernorm.", "embed_norm."),
            ("mtp_layers.#.hidden_layernorm.", "state_norm."),
            ("mtp_layers.#.input_proj.", "fc."),
            ("mtp_layers.#.final_layernorm.", "norm."),
            ("mtp_layers.#.", "block."),
        ),
        state_first=True,
        chained=False,
    ),
    # MiMo-V2.
    MtpLayout(
        name="mimo_v2",
        names=(
            ("mtp.layers.#.enorm.", "embed_norm."),
            ("mtp.layers.#.hnorm.", "state_norm."),
            ("mtp.layers.#.eh_proj.", "fc."),
            ("mtp.layers.#.final_layernorm.", "norm."),
            ("mtp.layers.#.pre_mlp_layernorm.", "block.post_attention_layernorm."),
            ("mtp.layers.#.", "block."),
        ),
        chained=False,
    ),
    # Qwen3-Next, Qwen3.5 and EXAONE MoE.
    MtpLayout(
        name="qwen",
        names=(
            ("mtp.pre_fc_norm_embedding.", "embed_norm."),
            ("mtp.pre_fc_norm_hidden.", "state_norm."),
            ("mtp.fc.", "fc."),
            ("mtp.norm.", "norm."),
            ("mtp.layers.#.", "block."),
            ("mtp.", ""),
        ),
    ),
    # ERNIE 4.5; it has no norm before the output layer.
    MtpLayout(
        name="ernie",
        names=(
            ("mtp_emb_norm.#.", "embed_norm."),
            ("mtp_hidden_norm.#.", "state_norm."),
            ("mtp_linear_proj.#.", "fc."),
            ("mtp_block.#.", "block."),
        ),
    ),
)


def find_mtp(names: Iterable[str]) -> MtpTensors | None:
    """The MTP layers among a checkpoint's tensors; None: it has none of a known layout."""
    held = list(names)
    for layout in _LAYOUTS:
        shared: dict[str, str] = {}
        layers: dict[int, dict[str, str]] = {}
        for public in held:
            if (found := layout.canonical(public)) is not None:
                number, own = found
                (shared if number is None else layers.setdefault(number, {}))[own] = public
        # The model's own layers have no such matrix.
        layers = {number: own for number, own in layers.items() if JOIN in own or JOIN in shared}
        if layers:
            every = frozenset(public for own in (shared, *layers.values()) for public in own.values())
            found_layers = (
                MtpLayerTensors(layout=layout, number=each, names=shared | layers[each]) for each in sorted(layers)
            )
            return MtpTensors(layout=layout, layers=tuple(found_layers), every=every)
    return None
