"""What the standing benchmark puts on the host: so many requests at once, plain or with drafts."""

from __future__ import annotations

from dataclasses import dataclass

from services.whole_number import whole_number
from speculation.errors import ConfigurationError
from speculation.sources import STRATEGIES

# Tokens of a prompt.
_PROMPT = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLoad:
    """Requests that decode at once.

    Attributes:
        nodes: most drafted nodes of a request and step; 0: plain decoding.
        goal_s: what a step may cost on two cores; None: no goal was set.
    """

    requests: int
    strategy: str = "autoregressive"
    nodes: int = 0
    prompt: int = _PROMPT
    goal_s: float | None = None

    @property
    def name(self) -> str:
        """As users name it: ``64``, or ``64x4:blend``."""
        return f"{self.requests}x{self.nodes}:{self.strategy}" if self.nodes else f"{self.requests}"


STANDING = (
    HostLoad(requests=64, goal_s=0.0004),
    HostLoad(requests=256, goal_s=0.0015),
    HostLoad(requests=64, strategy="blend", nodes=4, goal_s=0.002),
)


def read_load(text: str) -> HostLoad:
    """A load from its name.

    Raises:
        ConfigurationError: it is no name of one; says what is.
    """
    for load in STANDING:
        if load.name == text:
            return load
    size, _, strategy = text.partition(":")
    requests, drafted, nodes = size.partition("x")
    many, most_nodes = whole_number(requests, 1, 1024), whole_number(nodes if drafted else "1", 1, 128)
    known = bool(STRATEGIES.get(strategy)) if drafted else not strategy
    if not known or many is None or most_nodes is None:
        raise ConfigurationError(
            f"--loads has {text}: must be a number of requests, as 64, or requests x nodes:strategy, as 64x4:blend"
        )
    return HostLoad(requests=many, strategy=strategy, nodes=most_nodes) if drafted else HostLoad(requests=many)
