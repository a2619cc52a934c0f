"""The target that writes training data: it keeps the hidden states that a decoding loop reports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from services.verifier.config import TargetConfig
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.loop import DecodingLoop
from services.verifier.model.target import TransformersTarget
from speculation.budget import FixedBudget
from speculation.types import Features

_FLOAT16_MOST = float(np.finfo(np.float16).max)


class ObservedTarget(TransformersTarget):
    """Keeps the hidden states of every request until they are taken.

    Attributes:
        observed_rows: rows whose states have been computed so far.
    """

    def __init__(self, config: TargetConfig) -> None:
        self.observed_rows = 0
        self._observed: dict[str, list[Features]] = {}
        super().__init__(config)

    @override
    def features(self, request_id: str, rows: Sequence[int]) -> Features:
        found = super().features(request_id, rows)
        self.observed_rows += found.rows
        self._observed.setdefault(request_id, []).append(found)
        return found

    def take(self, request_id: str, rows: int, width: int) -> tuple[NDArray[np.float16], NDArray[np.bool_]]:
        """A request's states, [rows, width], and which of them are known, [rows]. They are kept no longer."""
        states, known = np.zeros((rows, width), dtype=np.float16), np.zeros(rows, dtype=np.bool_)
        for each in self._observed.pop(request_id, ()):
            end = min(rows, each.start + each.rows)
            states[each.start : end] = _as_float16(each)[: end - each.start]
            known[each.start : end] = True
        return states, known


def _as_float16(features: Features) -> NDArray[np.float16]:
    """[rows, width]. bfloat16 becomes the nearest float16; numbers beyond its range are clamped."""
    if features.dtype == "float16":
        return np.frombuffer(bytes(features.data), dtype="<f2").reshape(features.rows, features.width)
    wide = (np.frombuffer(bytes(features.data), dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return wide.clip(-_FLOAT16_MOST, _FLOAT16_MOST).astype(np.float16).reshape(features.rows, features.width)


def load_target(config: TargetConfig) -> tuple[ObservedTarget, Executor]:
    """Load the target, and return it with the one thread that may compute with it.

    Raises:
        ConfigurationError: the model cannot be served; says why.
    """
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="target")
    try:
        return worker.submit(ObservedTarget, config).result(), worker
    except BaseException:
        worker.shutdown()
        raise


@asynccontextmanager
async def plain_decoding(target: ObservedTarget, worker: Executor, concurrency: int) -> AsyncIterator[DecodingLoop]:
    """A decoding loop without drafts for ``concurrency`` requests at a time: full passes gain nothing by speculation.

    Leaving it shuts the worker down.
    """
    config = LoopConfig(max_num_seqs=concurrency, max_waiting=2 * concurrency, kept_feature_bytes=0)
    loop = DecodingLoop(target, [], FixedBudget(max_nodes=0), config, worker)
    await loop.start()
    try:
        yield loop
    finally:
        await loop.stop()
