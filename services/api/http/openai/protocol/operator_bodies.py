"""The bodies of the paths for operators: adapters and pauses by vLLM's names, weights and pauses by SGLang's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.api.http.declared import Declared
from services.api.http.openai.protocol.marks import NO_EFFECT, OnlyFalse, OnlyTrue
from services.api.http.openai.protocol.parts import Filled, Within
from speculation.reloads import PauseMode, RunningAnswers


class LoadAdapterBody(Declared):
    """An adapter that requests are to name as their model."""

    lora_name: Filled
    lora_path: Filled = Field(
        description="its folder: an absolute path at the verifiers, in one of their verifier.lora_folders"
    )
    load_inplace: Annotated[OnlyFalse | None, NO_EFFECT] = Field(None, description="unload the one of that name first")


class UnloadAdapterBody(Declared):
    """An adapter that is to go, once the answers under way with it have ended."""

    lora_name: Filled


class ReloadBody(Declared):
    """Weights that are to take the place of those that are served."""

    model_path: Filled = Field(
        description="the folder of the new weights: an absolute path at the verifiers, in one of their verifier.weights_from"
    )
    running: RunningAnswers | None = Field(
        None,
        description="what becomes of answers under way; finish: they end with the old weights; restart: those that are sent "
        "as a whole begin once more with the new ones; unset: finish",
    )
    within_s: Within = None
    load_format: Annotated[Literal["auto", "safetensors"] | None, NO_EFFECT] = Field(None, description="safetensors alone")
    flush_cache: Annotated[OnlyTrue | None, NO_EFFECT] = Field(None, description="caches of the old weights are void")
    abort_all_requests: Annotated[OnlyFalse | None, NO_EFFECT] = Field(None, description="no request is dropped")


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
