"""Suites of tests/lossless run over ranks and stages, or say why not; and targets are laid out there as they say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from tests.engine.layouts import LAYOUTS, in_one_process, laid_out
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.suites import LAID_OUT, LEFT_OUT, OF_ONE_PROCESS, ONE_PROCESS, OTHERS
from tests.running.refusals import refuses
from tests.tiny_models.attention_models import make_architecture

_HERE = Path(__file__).parent


def test_every_suite_is_laid_out_or_says_why_not() -> None:
    there = {file.stem for file in _HERE.glob("test_*.py")} - {Path(__file__).stem}
    assert not LAID_OUT.keys() & LEFT_OUT.keys()
    assert {*LAID_OUT, *LEFT_OUT} == there
    assert all(LEFT_OUT.values()) and (ONE_PROCESS, *OTHERS) == tuple(LAYOUTS)


def test_tests_that_are_left_out_are_there() -> None:
    tests = set()
    for suite in LAID_OUT:
        found = ast.walk(ast.parse((_HERE / f"{suite}.py").read_text()))
        tests |= {f"{suite}::{one.name}" for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {name for names in OF_ONE_PROCESS.values() for name in names} <= tests


@needs_kernels
@pytest.mark.parametrize("name", LAYOUTS)
def test_targets_are_laid_out(tiny_model: Path, name: str) -> None:
    config, layout = TargetConfig(model_path=str(tiny_model), kv_cache_tokens=512, threads=1), LAYOUTS[name]
    with laid_out(layout):
        target = TransformersTarget(config)
        assert (target._config.tensor_parallel_size, target.depth) == (layout.ranks, layout.stages)
        assert len(target.pool.keys) == 2 // layout.stages
        with in_one_process():
            assert TransformersTarget(config)._config.processes == 1
        target.beat()


@needs_kernels
def test_who_cannot_be_laid_out_fails_where_that_is_not_expected(tmp_path: Path) -> None:
    make_architecture(tmp_path, "alibi")
    config = TargetConfig(model_path=str(tmp_path), kv_cache_tokens=512, threads=1)
    with laid_out(LAYOUTS["2 ranks"]), refuses(ConfigurationError, field="verifier.tensor_parallel_size", value=2):
        TransformersTarget(config)
    with laid_out(LAYOUTS["2 ranks"], skips=True), pytest.raises(pytest.skip.Exception):
        TransformersTarget(config)
