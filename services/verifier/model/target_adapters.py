"""The LoRA adapters of a target, loaded in all of its processes or in none."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.verifier.loading.peft_folder import read_adapter
from services.verifier.model.lora_adapters import LoraAdapters
from services.verifier.stages.upstream import EarlierStages
from speculation.errors import ConfigurationError, InvalidArgument

log = logging.getLogger(__name__)


class TargetAdapters:
    """Loads and unloads adapters. An adapter has a name here once every process has it, so that no request comes before.

    Attributes:
        base: the folder of the model, whose weights may be replaced.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self._own: LoraAdapters | None = None
        self._earlier: EarlierStages
        # Held while an adapter is loaded, and while stages are replaced, which then load all adapters again.
        self._loading = threading.Lock()

    def connect(self, own: LoraAdapters | None, earlier: EarlierStages) -> None:
        """Keep adapters in this process's layers and in those of other stages from now on.

        Args:
            own: None: requests may have none.
        """
        self._own, self._earlier = own, earlier

    @property
    def digests(self) -> dict[str, str]:
        """Of the adapters, by name."""
        return {} if self._own is None else self._own.digests

    def load(self, name: str, folder: Path) -> str:
        """As ``TransformersTarget.load_adapter``."""
        own = self._own
        if own is None:
            raise ConfigurationError("no folder is named there", field="verifier.lora_folders", value="[]")
        stored = read_adapter(folder, own.layers, self.base)
        with self._loading:
            if own.digests.get(name, stored.digest) != stored.digest:
                raise InvalidArgument("lora_name", name, "a name that no other adapter has: unload that one first")
            if name not in own.digests:
                self._earlier.load_adapter(name, stored.where, stored.digest)
                try:
                    own.add(name, stored)
                except BaseException:
                    self._earlier.drop_adapter(name)
                    raise
        log.info("adapter %s is loaded from %s", name, folder)
        return stored.digest

    def load_for_noise(self, folder: Path) -> None:
        """Let rows of noise have the adapter in ``folder``.

        Raises:
            ConfigurationError, TargetLost: as ``load``.
        """
        assert self._own is not None
        stored = read_adapter(folder, self._own.layers, self.base)
        self._earlier.draft_by(stored.where, stored.digest)
        self._own.draft_by(stored)
        log.info("rows of noise draft with the adapter at %s", folder)

    def check(self, base: Path) -> None:
        """Check that all adapters are for the model as it is in ``base``, too.

        Raises:
            ConfigurationError: one is not, or cannot be read any more, or has changed.
        """
        own = self._own
        digests = {} if own is None else own.digests
        for name, folder in ({} if own is None else own.folders).items():
            assert own is not None
            if read_adapter(Path(folder), own.layers, base).digest != digests.get(name):
                raise ConfigurationError(
                    f"the adapter {name} at {folder} has changed since it was loaded: unload it, or put its files back",
                    about=folder,
                )

    def unload(self, name: str) -> None:
        """As ``TransformersTarget.unload_adapter``."""
        assert self._own is not None
        self._own.remove(name)
        self._earlier.drop_adapter(name)
        log.info("adapter %s is unloaded", name)

    def assign(self, request_id: str, name: str) -> None:
        """Compute the request just opened with an adapter; empty: with none."""
        if self._own is not None and name:
            self._own.assign(request_id, name)
            self._earlier.adapt(request_id, name)

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request here, which may be nothing; other stages drop it as it is closed."""
        if self._own is not None:
            self._own.forget(request_id)

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """Let stages be replaced within, and load the adapters again before they serve.

        Raises:
            TargetLost: a stage has died again.
        """
        with self._loading:
            yield
            if self._own is not None:
                self._own.forget_all()
                self._load_again(self._own)

    def _load_again(self, own: LoraAdapters) -> None:
        digests = own.digests
        for name, folder in own.folders.items():
            try:
                self._earlier.load_adapter(name, folder, digests[name])
            except ConfigurationError as error:
                log.error("the adapter %s is dropped, since a stage that was replaced cannot load it again: %s", name, error)
                with contextlib.suppress(KeyError):
                    own.remove(name)
            if name not in own.digests:
                # It may have been unloaded meanwhile.
                self._earlier.drop_adapter(name)
        if own.of_noise is not None:
            try:
                self._earlier.draft_by(*own.of_noise)
            except ConfigurationError as error:
                # Guesses are worse then, and answers the same.
                log.error("a stage that was replaced cannot load the adapter of rows of noise again: %s", error)
