"""Over how many pipeline stages, and ranks of each, tests lay their targets out: as the settings would, at one place for all.

A stage or rank is a thread of the tests' process, and they gather by gloo, as processes do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.stages.upstream import Launch
from speculation.errors import ConfigurationError
from tests.engine.stage_threads import launch_thread

# By which settings a target is refused that cannot be laid out so.
_FIELDS = ("verifier.tensor_parallel_size", "verifier.stages")
# A rank that fails leaves the others waiting, so tests end soon.
_PASS_S = 30.0
_alone = [False]


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes of a target."""

    ranks: int = 1
    stages: int = 1


ONE_PROCESS = Layout()
# All but the first are of several processes.
LAYOUTS = {
    "one process": ONE_PROCESS,
    "2 ranks": Layout(ranks=2),
    "4 ranks": Layout(ranks=4),
    "2 stages of 2 ranks": Layout(ranks=2, stages=2),
}


@contextmanager
def laid_out(layout: Layout, *, skips: bool = False) -> Iterator[None]:
    """Lay out every target that is made within, but for those whose settings do it themselves; they end with the block.

    Streams are left out there: no rank computes them, so that those who draft by them do so from hidden states. A test that runs
    passes by ``forward`` need not keep what it has computed: in one process nobody asks how much that is.

    Args:
        skips: whether models that cannot be laid out so are no reason to fail.
    """
    if layout == ONE_PROCESS:
        yield
        return
    begin, run, made = TransformersTarget.__init__, TransformersTarget.forward, list[TransformersTarget]()

    def spread(
        self: TransformersTarget, config: TargetConfig, launch: Launch | None = None, *given: Any, **named: Any
    ) -> None:
        if _alone[-1] or config.processes > 1:
            begin(self, config, launch, *given, **named)
            return
        wanted = replace(
            config,
            tensor_parallel_size=layout.ranks,
            stages=layout.stages,
            pass_timeout_s=min(config.pass_timeout_s, _PASS_S),
        )
        named.pop("streams", None)
        try:
            begin(self, wanted, launch_thread, None, *given[1:], **named)
        except ConfigurationError as error:
            if skips and error.field in _FIELDS:
                pytest.skip(str(error))
            raise
        made.append(self)

    def forward(self: TransformersTarget, batch: Sequence[Rows]) -> list[torch.Tensor]:
        for rows in batch:
            self._earlier.keep(rows.request_id, rows.context, ())
        return run(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersTarget, "__init__", spread)
        patch.setattr(TransformersTarget, "forward", forward)
        yield
    for target in made:
        target.shutdown()


@contextmanager
def in_one_process() -> Iterator[None]:
    """Within ``laid_out``, keep targets that are made in one process: what they say is what others must say."""
    _alone.append(True)
    try:
        yield
    finally:
        _alone.pop()
