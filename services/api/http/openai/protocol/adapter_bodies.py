"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, by vLLM's names."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from services.api.http.declared import Declared
from services.api.http.openai.protocol.marks import NO_EFFECT, OnlyFalse
from services.api.http.openai.protocol.parts import Filled


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
