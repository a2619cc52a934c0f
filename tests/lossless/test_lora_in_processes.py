"""LoRA adapters of a target whose stages, or their ranks, are processes: one that hangs or dies is replaced, and has the adapters
again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from services.verifier.model.target import TransformersTarget
from services.verifier.stages import upstream
from speculation.errors import TargetLost
from tests.engine.stage_forks import forked_stages, launch_fork
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_lora_in_stages import config, passes, same
from tests.lossless.test_tensor_parallel import SIZES
from tests.tiny_models.lora import WITH_ENDS, make_adapter
from tests.tiny_models.tiny import make_tiny_model

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("stages"),
    needs_kernels,
]


@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (2, 2)])
def test_a_process_that_is_replaced_loads_its_adapters_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int, ranks: int
) -> None:
    model = make_tiny_model(tmp_path, **{**SIZES, "num_hidden_layers": 2})
    folders = {f"{seed}": make_adapter(tmp_path / f"{seed}", model, seed=seed, targets=WITH_ENDS) for seed in (1, 2, 3)}
    settings = {"lora_modules": {"1": str(folders["1"])}, "lora_folders": (tmp_path,)}
    alone = TransformersTarget(config(model, 1, **settings))
    others = forked_stages()
    split = TransformersTarget(config(model, stages, tensor_parallel_size=ranks, **settings), launch_fork)
    lost: list[str] = []

    def load_the_third() -> None:
        try:
            split.load_adapter("3", folders["3"])
        except TargetLost as error:
            lost.append(str(error))

    try:
        for target in (alone, split):
            target.load_adapter("2", folders["2"])
        wanted = passes(alone, "", "1", "2")
        assert same(passes(split, "", "1", "2"), wanted)
        for fault in (signal.SIGSTOP, signal.SIGKILL):
            first, *_ = started = [each for each in forked_stages() if each not in others]
            assert len(started) == stages * ranks - 1
            os.kill(first.pid, fault)
            loading = threading.Thread(target=load_the_third)
            loading.start()
            while loading.is_alive() and not split._adapters._loading.locked():
                time.sleep(0.01)
            monkeypatch.setattr(upstream, "_BEAT_S", 1.0)
            with pytest.raises(TargetLost, match="stage 0"):
                split.beat()
            monkeypatch.undo()
            split.recover()
            loading.join(30)
            assert not loading.is_alive() and split.adapters == alone.adapters
            assert same(passes(split, "", "1", "2"), wanted)
        assert len(lost) == 2 and all("stage 0 has died" in each for each in lost)
        for target in (alone, split):
            target.load_adapter("3", folders["3"])
        assert same(passes(split, "", "1", "2", "3"), passes(alone, "", "1", "2", "3"))
    finally:
        split.shutdown()
