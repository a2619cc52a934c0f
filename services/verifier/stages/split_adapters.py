"""LoRA adapters of a target in several processes: how the verifier has them loaded in all stages and ranks, or in none.

What is told here is text, and takes as long as files take, so it goes through the store where the stages have met, beside
the passes, which go on meanwhile. A stage reads an adapter for itself and keeps what is of its own layers, and each of its
ranks what is of its own outputs. Orders name adapters by numbers; the verifier gives none before every process has answered
that it has the adapter.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not exported in their types

from services.verifier.config import TargetConfig
from services.verifier.loading.allowed_folder import allowed_folder
from services.verifier.loading.peft_folder import AdaptableLayer, read_adapter
from services.verifier.stages.settling import process_name
from speculation.errors import ConfigurationError, OutriderError, TargetLost

if TYPE_CHECKING:
    from services.verifier.model.lora_adapters import LoraAdapters

log = logging.getLogger(__name__)

_JOIN_TIMEOUT = timedelta(seconds=60)
_POLL_S = 0.02
# How often a stage looks whether it is to load an adapter, and how long its end waits for one that it is loading.
_LISTEN_S, _PATIENCE_S = 0.1, 1.0


class SplitAdapters:
    """The verifier's side.

    Args:
        others: the processes of the target but for this one.
        alive: whether a process still runs, and is to.
        ranks: of each stage.
    """

    def __init__(self, store: TCPStore, others: range, alive: Callable[[int], bool], ranks: int = 1) -> None:
        self._store, self._others, self._alive, self._ranks = store, others, alive, ranks
        self._numbers: dict[str, int] = {}
        self._last = 0
        self._dropped: deque[int] = deque()

    def join(self, adapters: LoraAdapters) -> None:
        """Let every stage know which layers the whole model has that adapters may add to, once all have loaded theirs.

        Raises:
            TargetLost: a stage has died.
        """
        try:
            found: dict[str, AdaptableLayer] = {}
            for process in self._others:
                found |= _layers_of(self._store.get(f"adaptable/{process}").decode())
            adapters.layers = {**found, **adapters.layers}
            self._store.set("adaptable", _written(adapters.layers))
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
        self._last += 1
        number = self._last
        try:
            self._store.set(f"adapter/{number}", json.dumps({"folder": folder, "digest": digest}))
            # All are waited for, so that none loads it after it was dropped.
            refusals = {process: self._answer(number, process) for process in self._others}
        except RuntimeError as error:
            raise TargetLost(f"a stage has died while the adapter {name} was loaded") from error
        for process, refusal in refusals.items():
            if refusal:
                self._dropped.append(number)
                name_of_process = process_name(process, self._ranks)
                raise ConfigurationError(f"{name_of_process}: {refusal}", about=name_of_process)
        self._numbers[name] = number

    def drop(self, name: str) -> None:
        """Have an adapter dropped with the next orders; an unknown one is fine. May be called in any thread."""
        number = self._numbers.pop(name, None)
        if number is not None:
            self._dropped.append(number)

    def to_drop(self) -> list[int]:
        """The numbers of those that are to be dropped now."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    def _answer(self, number: int, process: int) -> str:
        """Why a stage has not loaded an adapter; empty: it has."""
        key = f"adapter/{number}/{process}"
        while not self._store.check([key]):
            if not self._alive(process):
                raise TargetLost(f"{process_name(process, self._ranks)} has died while it was loading an adapter")
            time.sleep(_POLL_S)
        answer: str = self._store.get(key).decode()
        return answer


class StageAdapters:
    """A stage's side: it loads what it is told to, in threads beside that of the passes.

    Made before the stage says that it is ready.

    Raises:
        TargetLost: the verifier cannot be reached.
    """

    def __init__(self, host: str, port: int, process: int, adapters: LoraAdapters, config: TargetConfig) -> None:
        self._process, self._adapters, self._config = process, adapters, config
        self._ended = threading.Event()
        self._listener = threading.Thread(target=self._follow, name="adapters", daemon=True)
        try:
            self._store = TCPStore(host, port, None, False, _JOIN_TIMEOUT)
            self._store.set(f"adaptable/{process}", _written(adapters.layers))
        except RuntimeError as error:
            raise TargetLost(f"no verifier at {host}:{port}") from error

    def start(self) -> None:
        """Begin to listen."""
        self._listener.start()

    def stop(self) -> None:
        """Listen no more."""
        self._ended.set()
        self._listener.join(_PATIENCE_S)

    def _follow(self) -> None:
        try:
            if layers := self._awaited("adaptable"):
                self._adapters.layers = _layers_of(layers)
            for number in count(1):
                if not (order := self._awaited(f"adapter/{number}")):
                    return
                told = json.loads(order)
                # A thread for each, since torch's threads in it go with it.
                with ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"adapter of stage {self._process}") as reader:
                    refusal = reader.submit(self._load, number, told["folder"], told["digest"]).result()
                self._store.set(f"adapter/{number}/{self._process}", refusal)
        except RuntimeError:
            # The stage's own thread notices that as well, and says so.
            log.debug("process %d hears nothing of adapters any more", self._process, exc_info=True)

    def _awaited(self, key: str) -> str:
        """What is written there, once it is; empty: nothing until the end.

        Asked for again and again: a thread that waits within torch would outlive the interpreter's end, and abort it.
        """
        while not self._ended.wait(_LISTEN_S):
            if self._store.check([key]):
                found: str = self._store.get(key).decode()
                return found
        return ""

    def _load(self, number: int, folder: str, digest: str) -> str:
        """Load an adapter; why it cannot, or nothing."""
        try:
            if folder not in self._named():
                allowed_folder("lora_path", folder, "verifier.lora_folders", self._config.lora_folders)
            stored = read_adapter(Path(folder), self._adapters.layers, Path(self._config.model_path))
            if stored.digest != digest:
                return f"it reads another adapter at {folder} than the verifier: both must reach the same files"
            self._adapters.add(str(number), stored)
        except OutriderError as error:
            return str(error)
        except Exception as error:
            log.exception("process %d cannot load the adapter at %s", self._process, folder)
            return f"cannot load the adapter at {folder}: {type(error).__name__}: {error}"
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
