"""The steps by which all verifiers of a service replace their weights together, or pause their decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReloadStep = Literal["read", "pause", "replace", "keep", "undo", "alive", "hold", "join", "go", "held"]
# What becomes of answers that are under way when weights are replaced.
RunningAnswers = Literal["finish", "restart"]
# When decoding is paused: they end first, or they stop between two tokens and go on afterwards.
PauseMode = Literal["wait", "keep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReloadOrder:
    """A step of replacing the weights of all verifiers of a service together: each step once all have done the one before.

    ``read``: load the weights in ``folder`` beside those that serve, and check them. ``pause``: let new requests wait until
    no answer is under way, for at most ``within_s`` seconds. ``replace``: compute by the new ones from now on. ``keep``: the
    old ones are dropped, and decoding goes on. ``undo``: all is as before ``read``; no error where nothing was done.
    ``alive``: whoever orders the reload is there, and waits for other verifiers; the next step comes later.
    Four belong to no reload. ``hold``: decode nothing until ``go``; where ``within_s`` is above 0, answers under way end
    first, within so many seconds. ``join``: the same for a verifier that has heard of neither since its start; an error
    where ``go`` has come; ``undo`` takes it back. ``held``: whether it is so; the answer is "held" or empty.

    Attributes:
        reload_id: names the reload in all of its steps, or the pause in ``hold``, ``join`` and ``undo``.
        running: ``finish``: answers under way end with the old weights; ``restart``: those of which nobody has seen anything
            begin once more with the new ones.
    """

    reload_id: str
    step: ReloadStep
    folder: str = ""
    running: RunningAnswers = "finish"
    within_s: float = 0.0

    @property
    def patience_s(self) -> float:
        """Seconds after which a verifier that has not answered counts as lost."""
        ended_s = self.within_s + 30.0
        known = {"read": 3600.0, "pause": ended_s, "hold": ended_s, "join": ended_s, "alive": 5.0}
        return known.get(self.step, 60.0)
