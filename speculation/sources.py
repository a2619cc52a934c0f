"""What each source of drafts needs and suits: the one table that router, drafter and verifier read.

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
        kind: ``text`` drafts from tokens in well under a millisecond, ``model`` computes a drafter of its own and may take
            long, ``head`` drafts inside the target's pass.
        nodes: most drafted nodes of a step, where nobody says: trees with branches need more of them than chains do.
        top_k: likeliest next tokens that it wants to be told of, after every verified node.
        layers: hidden states that it wants, see ``Features.layers``.
        prompt_features: whether it wants those of the prompt's positions, too.
        retrieval: whether it looks up a retrieval index; with ``layers``, one with hidden states in it.
        samples: whether its nodes are drawn from a known distribution q, as ``acceptance: rejection`` needs.
    """

    name: str
    kind: Kind = "text"
    nodes: int = 32
    top_k: int = 0
    layers: tuple[int, ...] = ()
    prompt_features: bool = False
    retrieval: bool = False
    samples: bool = False


def _table(*specs: SourceSpec) -> dict[str, SourceSpec]:
    return {spec.name: spec for spec in specs}


SOURCES = _table(
    SourceSpec(name="autoregressive", nodes=0),
    SourceSpec(name="prompt_lookup", nodes=8),
    SourceSpec(name="suffix", nodes=16),
    SourceSpec(name="recycling", top_k=8),
    SourceSpec(name="anpd", nodes=8),
    SourceSpec(name="lookahead", nodes=120, top_k=1),
    SourceSpec(name="spectra_core", nodes=120, top_k=8),
    SourceSpec(name="spectra", nodes=120, top_k=8, retrieval=True),
    SourceSpec(name="retrieval", retrieval=True),
    SourceSpec(name="semantic", layers=(-1,), retrieval=True),
)
