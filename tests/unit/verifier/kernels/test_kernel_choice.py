"""Kernels are chosen by what they take here, among those that are exact; what was found is kept, and named by what it is of."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from cli.plan_report import examined_here, print_examined
from cluster.models.target import ResolvedModel
from cluster.settings.component_configs import verifier_config
from cluster.settings.config import load
from services.machine.processor import processor
from services.verifier.checks.kept_measurements import Kept, digest_of, latest
from services.verifier.config import TargetConfig
from services.verifier.kernels.cpu_choice import Choice, check_named, choose_kernels, fastest_exact, maker, shapes_of
from services.verifier.kernels.linears import MakeLinear, pack_linears
from services.verifier.kernels.native.library import library
from services.verifier.kernels.native.linear_kernel import NativeLinear
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

CONFIG = TargetConfig(model_path="of the test")


def model(outputs: int = 256, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(96, outputs, dtype=dtype))


class Slow(nn.Module):
    """Exact, and slower than anything: a row at a time, many times over."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight.double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            made = torch.cat([(row[None].double() @ self.weight.T).float() for row in rows.reshape(-1, rows.shape[-1])])
        return made


class Inexact(nn.Module):
    """Fast, but a row depends on how many others there are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.outputs = len(weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.full((rows.numel() // rows.shape[-1], self.outputs), float(len(rows)))


@pytest.fixture
def timed() -> Iterator[None]:
    """In one thread, which waits for no other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fastest(**makers: MakeLinear | type[nn.Module]) -> Choice:
    """The fastest exact one where these are all there is; the first would be taken without measurement."""
    named = {name: (Choice(linears="onednn", instructions=name), make) for name, make in makers.items()}
    return fastest_exact(named, shapes_of(model()))


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return Padded(layer)


class Padded(nn.Module):
    """torch's product over as many rows always: exact."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        parts = [self.layer(nn.functional.pad(part, (0, 0, 0, 64 - len(part))))[: len(part)] for part in flat.split(64)]
        return torch.cat(parts)


@pytest.mark.usefixtures("timed")
def test_a_candidate_that_loses_is_not_served() -> None:
    chosen = fastest(slow=Slow, fast=linear)
    assert chosen.instructions == "fast"
    assert chosen.milliseconds.keys() == {"slow", "fast", "torch"}
    assert chosen.reason.startswith("fastest exact, ms over 1/8/64/256 rows: slow ")


@pytest.mark.usefixtures("timed")
def test_one_that_is_not_exact_is_not_served_however_fast() -> None:
    chosen = fastest(inexact=Inexact, slow=Slow)
    assert "not exact here: inexact" in chosen.reason
    assert chosen.instructions == "slow"
    assert fastest(inexact=Inexact, other=Inexact).linears == "torch"


@pytest.mark.usefixtures("timed")
def test_what_was_found_is_kept_for_this_machine_and_model(tmp_path: Path) -> None:
    config = replace(CONFIG, kernels_dir=tmp_path)
    # However small the model, its layers are timed.
    choose = partial(choose_kernels, too_small=0)
    first = choose(model(), config)
    assert first.milliseconds
    (file,) = tmp_path.glob("*.json")
    assert latest(tmp_path, model="of the test")["reason"] == first.reason
    assert latest(tmp_path, model="another") is None
    assert choose(model(), config).milliseconds == first.milliseconds
    # Another shape, count of threads or kind of weights is another question.
    choose(model(outputs=512), config)
    choose(model(), replace(config, weights="float32"))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        choose(model(), config)
    finally:
        torch.set_num_threads(threads)
    assert len(list(tmp_path.glob("*.json"))) == 4
    file.write_text(json.dumps({**json.loads(file.read_text()), "measured": {"linears": "abacus"}}))
    assert choose(model(), config).linears != "abacus"


def test_settings_that_cannot_be_honoured() -> None:
    choose = partial(choose_kernels, find=lambda name: None)
    for name, value in (("kernels", "avx2"), ("weights", "as_stored")):
        with refuses(ConfigurationError, f"verifier.{name}", value):
            choose(model(), replace(CONFIG, **{name: value}))  # type: ignore[arg-type]
    assert choose(model(), replace(CONFIG, kernels="torch")).linears == "torch"
    # Before anything is loaded.
    for name, value in (("kernels", "avx2"), ("weights", "as_stored"), ("dtype", "int8"), ("kv_cache_dtype", "fp8")):
        with refuses(ConfigurationError, f"verifier.{name}", value):
            check_named(replace(CONFIG, **{name: value}), find=lambda name: None)  # type: ignore[arg-type]
    check_named(CONFIG)
    assert choose(model(), CONFIG).linears in ("onednn", "torch")


def test_weights_in_their_own_form_or_not() -> None:
    if (own := library()) is None:
        pytest.skip("no C compiler here")
    for weights, dtype, expected in (
        ("auto", torch.bfloat16, "bfloat16"),
        ("as_stored", torch.bfloat16, "bfloat16"),
        ("as_stored", torch.float32, "float32"),
        # Half precision is exact in float32, and kernels for it there are none.
        ("auto", torch.float16, "float32"),
        ("float32", torch.bfloat16, "float32"),
    ):
        given = model(dtype=dtype)
        choice = choose_kernels(given, replace(CONFIG, weights=weights))  # type: ignore[arg-type]
        make = maker(choice)
        assert make is not None
        pack_linears(given, make)
        packed = given[0]  # type: ignore[index]
        assert isinstance(packed, NativeLinear)
        assert (packed.stored_as, choice.instructions) == (expected, own.name)


def test_layers_are_freed_as_soon_as_they_are_replaced() -> None:
    layers = nn.Sequential(*[model() for _ in range(6)])
    weights = [weakref.ref(layer.weight) for layer in layers.modules() if isinstance(layer, nn.Linear)]
    alive: list[int] = []

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        alive.append(sum(each() is not None for each in weights))
        return nn.Identity()

    assert pack_linears(layers, make) == 6
    assert alive == [6, 5, 4, 3, 2, 1]


def test_cores_are_those_that_a_container_grants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.machine import processor

    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(processor, "_CPU_QUOTA", quota)
    everything = processor.cores()
    for text, cores in (
        ("max 100000", everything),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("9900000 100000", everything),
    ):
        quota.write_text(text)
        assert processor.cores() == min(cores, len(os.sched_getaffinity(0)))


def test_the_plan_says_what_was_chosen_and_why(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    settings = load(flags=[f"model={tiny_model}", f"cache_dir={tmp_path}", "server.port=0"], environ={})
    print_examined(examined_here(settings))
    assert (
        "kernels: verifier.kernels: auto, verifier.weights: auto; the first start times what there is"
        in capsys.readouterr().out
    )
    config = verifier_config(settings, ResolvedModel(name="tiny", path=tiny_model)).target
    about = {"model": digest_of(config.model_path), "processor": processor()}
    found = Choice(linears="native", instructions="avx2", weights="as_stored", reason="fastest exact, of the test")
    assert config.kernels_dir is not None
    Kept(config.kernels_dir, about).write(asdict(found))
    print_examined(examined_here(settings))
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "kernels: native avx2, weights as_stored (verifier.kernels: auto, verifier.weights: auto); fastest exact, of the test"
        in said
    )
