"""What each source of drafts needs, and which sources a strategy uses. Router, drafter and verifier all read it here.

A new source is one file in ``services/drafter`` (or ``services/verifier/heads``) and one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "model", "head"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """A source of drafts.

    Attributes:
        made_by: "module:function", which makes the source from its component's configuration.
        kind: ``text`` drafts from tokens in well under a millisecond; ``model`` runs a model of its own and may take long;
            ``head`` drafts inside the target's pass.
        nodes: default for the most drafted nodes per step; trees with branches need more than chains.
        top_k: how many of the likeliest next tokens it wants reported after every verified node.
        layers: hidden states that it wants, see ``Features.layers``.
        prompt_features: whether it wants those of the prompt's positions, too.
        retrieval: whether it uses a retrieval index; with ``layers``, one that holds hidden states.
        samples: whether it draws its nodes from a known draft distribution q, as ``acceptance: rejection`` needs.
    """

    name: str
    made_by: str
    kind: Kind = "text"
    nodes: int = 32
    top_k: int = 0
    layers: tuple[int, ...] = ()
    prompt_features: bool = False
    retrieval: bool = False
    samples: bool = False


def _table(*specs: SourceSpec) -> dict[str, SourceSpec]:
    return {spec.name: spec for spec in specs}


SOURCES: dict[str, SourceSpec] = _table(
    SourceSpec(name="autoregressive", made_by="services.drafter.autoregressive:make", nodes=0),
    SourceSpec(name="prompt_lookup", made_by="services.drafter.prompt_lookup:make", nodes=8),
    SourceSpec(name="suffix", made_by="services.drafter.suffix:make", nodes=16),
    SourceSpec(name="recycling", made_by="services.drafter.recycling:make", top_k=8),
    SourceSpec(name="anpd", made_by="services.drafter.anpd:make", nodes=8),
    SourceSpec(name="lookahead", made_by="services.drafter.lookahead:make", nodes=120, top_k=1),
    SourceSpec(name="spectra_core", made_by="services.drafter.spectra:make_core", nodes=120, top_k=8),
    SourceSpec(name="spectra", made_by="services.drafter.spectra:make_full", nodes=120, top_k=8, retrieval=True),
    SourceSpec(name="retrieval", made_by="services.drafter.corpus_hits:make", retrieval=True),
    SourceSpec(name="semantic", made_by="services.drafter.semantic:make", layers=(-1,), retrieval=True),
)

# Users name a strategy, which is a set of sources. Plain decoding is the empty set and needs no drafter.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "autoregressive": (),
    "prompt_lookup": ("prompt_lookup",),
    "suffix": ("suffix",),
    "recycling": ("recycling",),
    "blend": ("suffix", "recycling"),
    "anpd": ("anpd",),
    "lookahead": ("lookahead",),
    "spectra_core": ("spectra_core",),
    "spectra": ("spectra",),
    "spectra_retrieval": ("retrieval",),
    "rest": ("retrieval",),
    "semantic": ("semantic",),
}
# Sources that a strategy uses as well, on servers with a retrieval index that suits them.
WHERE_INDEXED: dict[str, tuple[str, ...]] = {"blend": ("retrieval", "semantic")}
# Nodes per step of strategies whose paper uses larger trees than the source's default.
STRATEGY_NODES: dict[str, int] = {"rest": 64}
