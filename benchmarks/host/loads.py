"""What the standing benchmark puts on the host: so many requests at once, plain or with drafts."""

from __future__ import annotations

from dataclasses import dataclass

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
    counts = [int(each) if each.isdecimal() else 0 for each in (requests, nodes if drafted else "1")]
    known = bool(STRATEGIES.get(strategy)) if drafted else not strategy
    if not known or not 1 <= counts[0] <= 1024 or not 1 <= counts[1] <= 128:
        raise ConfigurationError(
            f"--loads has {text}: must be a number of requests, as 64, or requests x nodes:strategy, as 64x4:blend"
        )
    return HostLoad(requests=counts[0], strategy=strategy, nodes=counts[1]) if drafted else HostLoad(requests=counts[0])
