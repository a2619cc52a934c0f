"""The calibrators of one drafter's blends: one for each combination of sources, and for each adapter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.drafter.config import DrafterConfig
from services.drafter.merging.calibrator import Calibrator
from services.drafter.native.blend import is_compiled
from services.drafter.native.calibrator import CompiledCalibrator
from services.drafter.native.library import drafting_library
from speculation.sources import runs_model

# Most calibrators of adapters: a few kilobytes each. Those that were asked for longest ago go first.
_MOST_OF_ADAPTERS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendedRequests:
    """Requests that learn together: a source's value depends on the sources beside it, and on whether the target samples.

    ``adapter``: the LoRA adapter of the target that answers them; empty: none.
    """

    names: tuple[str, ...]
    sampled: bool
    adapter: str = ""


class Calibrators:
    """Made when they are first asked for.

    Those of the model itself are saved. An adapter's begins with what its model's has learnt, and goes its own way from
    there; it is not saved, since another adapter may have the name after the next start.

    Args:
        prior_of: what a source claims of its kinds.
    """

    def __init__(self, config: DrafterConfig, prior_of: Callable[[str], Mapping[str, float]]) -> None:
        self._config = config
        self._prior_of = prior_of
        self._own: dict[BlendedRequests, Calibrator] = {}
        self._of_adapters: OrderedDict[BlendedRequests, Calibrator] = OrderedDict()

    def of(self, blended: BlendedRequests) -> Calibrator:
        """The calibrator of these requests."""
        if blended.adapter:
            return self._of_adapter(blended)
        found = self._own.get(blended)
        if found is None:
            found = self._own[blended] = self._new(blended.names)
            if (file := self._file(blended)) is not None:
                found.load(file)
        return found

    def save(self) -> None:
        """Save what was learnt about the sources, if a file is configured."""
        for blended, calibrator in self._own.items():
            if (file := self._file(blended)) is not None:
                calibrator.save(file)

    def _of_adapter(self, blended: BlendedRequests) -> Calibrator:
        found = self._of_adapters.get(blended)
        if found is None:
            found = self._of_adapters[blended] = self._new(blended.names)
            found.begin_with(self.of(BlendedRequests(names=blended.names, sampled=blended.sampled)))
        self._of_adapters.move_to_end(blended)
        if len(self._of_adapters) > _MOST_OF_ADAPTERS:
            self._of_adapters.popitem(last=False)
        return found

    def _new(self, names: tuple[str, ...]) -> Calibrator:
        prior: dict[str, float] = {}
        for name in names:
            prior |= self._prior_of(name)
        # A snapshot is asked by the reference alone.
        if is_compiled(names) and drafting_library() is not None and self._config.recycling.snapshot is None:
            return CompiledCalibrator(prior)
        return Calibrator(prior, [name for name in names if runs_model(name)])

    def _file(self, blended: BlendedRequests) -> Path | None:
        """The file for what is learnt; None: it is not saved."""
        kept, combined = self._config.calibration, "-".join(blended.names)
        return None if kept is None else kept.with_suffix(f".{combined}{'-sampled' * blended.sampled}.json")
