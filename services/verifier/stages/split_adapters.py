"""LoRA adapters of a target in several processes: how the verifier has them loaded in all stages and ranks, or in none.

A stage reads an adapter for itself, when it is asked to (``beside``), and keeps what is of its own layers, and each of its
ranks what is of its own outputs. Orders name adapters by numbers; the verifier gives none before every process has answered
that it has the adapter.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.verifier.config import TargetConfig
from services.verifier.loading.allowed_folder import allowed_folder
from services.verifier.loading.peft_folder import AdaptableLayer, read_adapter
from services.verifier.stages.beside import Asking, Listening, refusal, refused
from speculation.errors import ConfigurationError, TargetLost

if TYPE_CHECKING:
    from services.verifier.model.lora_adapters import LoraAdapters

_KIND, _LAYERS = "adapter", "adaptable"


class SplitAdapters:
    """The verifier's side."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._numbers: dict[str, int] = {}
        self._dropped: deque[int] = deque()

    def join(self, adapters: LoraAdapters) -> None:
        """Let every stage know which layers the whole model has that adapters may add to, once all have loaded theirs.

        Raises:
            TargetLost: a stage has died.
        """
        store = self._asking.store
        try:
            found: dict[str, AdaptableLayer] = {}
            for process in self._asking.others:
                found |= _layers_of(store.get(f"{_LAYERS}/{process}").decode())
            adapters.layers = {**found, **adapters.layers}
            store.set(_LAYERS, _written(adapters.layers))
        except RuntimeError as error:
            raise TargetLost("a stage has died while the stages were connecting") from error

    def number_of(self, name: str) -> int:
        """By which orders name an adapter that is loaded."""
        return self._numbers[name]

    def load(self, name: str, folder: str, digest: str) -> None:
        """Have an adapter loaded by all, and wait for it. One call at a time; passes may run.

        Raises:
            ConfigurationError: a stage cannot; says which one and why. None keeps it.
            TargetLost: a stage has died.
        """
        number = self._asking.tell(_KIND, folder=folder, digest=digest)
        for process, answer in self._asking.answers(number, "loading an adapter").items():
            if (why := refused(answer)) is not None:
                self._dropped.append(number)
                raise ConfigurationError(f"{process}: {why}", about=process)
        self._numbers[name] = number

    def drop(self, name: str) -> None:
        """Have an adapter dropped with the next orders; an unknown one is fine. May be called in any thread."""
        number = self._numbers.pop(name, None)
        if number is not None:
            self._dropped.append(number)

    def to_drop(self) -> list[int]:
        """The numbers of those that are to be dropped now."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


class StageAdapters:
    """A stage's side."""

    def __init__(self, listening: Listening, process: int, adapters: LoraAdapters, config: TargetConfig) -> None:
        self._store, self._adapters, self._config = listening.store, adapters, config
        self._knows_all = False
        try:
            self._store.set(f"{_LAYERS}/{process}", _written(adapters.layers))
        except RuntimeError as error:
            raise TargetLost("the verifier is gone") from error
        listening.answer(_KIND, self._load)

    def _load(self, number: int, told: Mapping[str, str]) -> str:
        folder = told["folder"]
        if not self._knows_all:
            self._adapters.layers = _layers_of(self._store.get(_LAYERS).decode())
            self._knows_all = True
        if folder not in self._named():
            allowed_folder("lora_path", folder, "verifier.lora_folders", self._config.lora_folders)
        # What it holds of the model's own weights, which may have been replaced, the verifier has compared.
        stored = read_adapter(Path(folder), self._adapters.layers, None)
        if stored.digest != told["digest"]:
            return refusal(f"it reads another adapter at {folder} than the verifier: both must reach the same files")
        self._adapters.add(str(number), stored)
        return ""

    def _named(self) -> set[str]:
        of_requests = {str(Path(folder).expanduser()) for folder in self._config.lora_modules.values()}
        return of_requests | ({str(self._config.draft_adapter)} if self._config.draft_adapter is not None else set())


def _written(layers: Mapping[str, AdaptableLayer]) -> str:
    return json.dumps({name: dataclasses.astuple(layer) for name, layer in layers.items()})


def _layers_of(text: str) -> dict[str, AdaptableLayer]:
    """The inverse of ``_written``."""
    fields = [field.name for field in dataclasses.fields(AdaptableLayer)]
    return {name: AdaptableLayer(**dict(zip(fields, values, strict=True))) for name, values in json.loads(text).items()}
