"""What a request's drafters ask to be shown of its passes."""

from __future__ import annotations

from typing import NamedTuple

from services.verifier.model.target_port import StreamSpec
from speculation.sources import spec_of
from speculation.types import Plan


class Observes(NamedTuple):
    """What a request's drafters want of its passes: top ids per row, hidden states of layers, and whether of the prompt."""

    top_k: int
    layers: tuple[int, ...]
    prompt: bool


NOTHING = Observes(0, (), prompt=False)


def observed_by(plan: Plan, sources: tuple[str, ...], streams: StreamSpec | None) -> Observes:
    """What is wanted while ``sources`` draft, of those of the plan.

    Args:
        streams: those that the request's rows may have in a pass; None: none.
    """
    specs = [spec for name in sources if (spec := spec_of(name)) is not None]
    if len(sources) == len(plan.sources):
        # The prompt's rows have no streams.
        others = streams is None or len(plan.observe_layers) > streams.rows
        return Observes(plan.observe_top_k, plan.observe_layers, plan.observe_prompt and others)
    return Observes(
        top_k=max((spec.top_k for spec in specs), default=0),
        layers=plan.observe_layers if any(spec.layers for spec in specs) else (),
        prompt=any(spec.prompt_features for spec in specs),
    )
