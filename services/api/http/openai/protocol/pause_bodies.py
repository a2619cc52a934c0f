"""The bodies of the paths that pause decoding, by vLLM's names (``/pause``) and by SGLang's (``/pause_generation``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.api.http.declared import Declared
from services.api.http.openai.protocol.marks import NO_EFFECT, OnlyTrue
from services.api.http.openai.protocol.parts import Within
from speculation.reloads import PauseMode


class PauseBody(Declared):
    """How decoding is paused."""

    mode: PauseMode | None = Field(
        None,
        description="what becomes of answers under way; wait: they end first; keep: they stop between two tokens, and go on "
        "after /resume; unset: wait",
    )
    within_s: Within = None
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
