"""The bodies of the paths that pause decoding, by vLLM's names (``/pause``) and by SGLang's (``/pause_generation``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.api.http.declared import Declared
from services.api.http.openai.protocol.marks import NO_EFFECT, OnlyTrue
from speculation import limits
from speculation.reloads import PauseMode

_LEAST_S, _MOST_S = limits.RELOAD_WITHIN_S


class PauseBody(Declared):
    """How decoding is paused."""

    mode: PauseMode | None = Field(
        None,
        description="what becomes of answers under way; wait: they end first; keep: they stop between two tokens, and go on "
        "after /resume; unset: wait",
    )
    within_s: float | None = Field(
        None,
        ge=_LEAST_S,
        le=_MOST_S,
        description="seconds within which they must have ended (wait), else nothing is paused; unset: 600",
    )
    wait_for_inflight_requests: Annotated[OnlyTrue | None, NO_EFFECT] = Field(None, description="no request is dropped")
    clear_cache: Annotated[bool | None, NO_EFFECT] = Field(None, description="new weights void what the old ones computed")


class PauseGenerationBody(Declared):
    """The same by SGLang's names."""

    mode: Literal["in_place", "retract"] | None = Field(
        None,
        description="in_place, retract: answers under way stop between two tokens, and go on after /continue_generation; "
        "unset: they end first",
    )


class ResumeBody(Declared):
    """Nothing is asked for."""
