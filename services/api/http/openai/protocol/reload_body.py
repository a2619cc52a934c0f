"""The body of /update_weights_from_disk, by SGLang's names where it has them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.api.http.declared import Declared
from services.api.http.openai.protocol.marks import NO_EFFECT, OnlyFalse, OnlyTrue
from services.api.http.openai.protocol.parts import Filled, Within
from speculation.reloads import RunningAnswers


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
