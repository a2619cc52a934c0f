"""What drafts cost the passes that run meanwhile, for all origins of a loop. Uses no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from services.verifier.engine.deciding.asking import AskCost
from services.verifier.engine.passes import Part, PassSize

# The requests of a pass for which an origin had work meanwhile, by origin: whether each uses costly sources.
Busy = Mapping[str, Sequence[bool]]


class DraftCosts:
    """The cost of a draft for each origin, apart for requests that use costly sources and for the others.

    Args:
        origins: their names.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = tuple(origins)
        self._costs = {(origin, costly): AskCost() for origin in self._origins for costly in (False, True)}

    def of(self, origin: str, *, costly: bool) -> AskCost:
        """What a draft of ``origin`` costs for a request that uses costly sources, or for another one."""
        return self._costs[origin, costly]

    def busy(self, parts: Sequence[Part]) -> Busy:
        """For which requests of a pass whose results are not committed yet each origin had work."""
        found: dict[str, list[bool]] = {origin: [] for origin in self._origins}
        for request in [part.request for part in parts if part.request.mailboxes]:
            for origin, mailbox in request.mailboxes.items():
                if mailbox.busy(len(request.tokens)):
                    found[origin].append(bool(request.used))
        return found

    def slowed_s(self, busy: Busy) -> float:
        """How much longer a pass took because drafts were made meanwhile, in seconds."""
        return sum(self._costs[origin, costly].known_s for origin, each in busy.items() for costly in each)

    def learn(self, size: PassSize, busy: Busy, seconds: float, expected_s: float) -> None:
        """Learn from a pass without prompts, before what it brought is committed.

        Args:
            seconds: that it took, until its result was here; ``expected_s``: seconds of such a pass.
        """
        for origin, each in busy.items():
            for costly in (False, True):
                # The other requests' drafts would make these look dearer.
                if (not costly) not in each:
                    self._costs[origin, costly].learn(
                        requests=size.parts, rows=size.rows, drafts=len(each), seconds=seconds, expected_s=expected_s
                    )
