"""Settings of LoRA adapters: what cannot be served is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.checks import preflight
from cluster.settings.config import Settings, load
from services.model_files.peft_config import CONFIG
from services.verifier.config import TargetConfig, check_backends
from services.verifier.kernels.cpu_choice import choose_kernels
from services.verifier.loading.load_model import load_whole
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.lora import make_adapter


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "one", tiny_model)


def settings_of(model: Path, tmp_path: Path, *flags: str) -> Settings:
    return load(flags=[f"model={model}", "server.port=0", f"cache_dir={tmp_path / 'cache'}", *flags], environ={})


def test_an_adapter_that_would_be_served(tiny_model: Path, adapter: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_model, tmp_path, f"verifier.lora_modules={{billing/de-1: {adapter}}}")
    assert settings.verifier.lora_modules == {"billing/de-1": str(adapter)}
    assert preflight.preflight(settings) == ()


@pytest.mark.parametrize("name", ["", "two words", "ä", "x" * 129, "our-model"])
def test_names_that_no_adapter_has(tiny_model: Path, adapter: Path, tmp_path: Path, name: str) -> None:
    flags = (f"verifier.lora_modules={{'{name}': {adapter}}}", "server.served_model_name=[our-model]")
    with refuses(ConfigurationError, "verifier.lora_modules"):
        preflight.preflight(settings_of(tiny_model, tmp_path, *flags))


def test_a_folder_without_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    with refuses(ConfigurationError, CONFIG):
        preflight.preflight(settings_of(tiny_model, tmp_path, f"verifier.lora_modules={{one: {tmp_path}}}"))


@pytest.mark.parametrize(
    "setting",
    [{"device": "cuda"}, {"dtype": "bfloat16"}, {"kernels": "onednn"}, {"kernels": "torch"}],
    ids=str,
)
def test_targets_that_have_no_adapters(setting: dict[str, str | int]) -> None:
    for field, value in (("lora_modules", {"one": "/adapters/one"}), ("lora_folders", (Path("/adapters"),))):
        config = TargetConfig(model_path="unused", **{field: value}, **setting)  # type: ignore[arg-type]
        with refuses(ConfigurationError, f"verifier.{field}"):
            check_backends(config)


def test_without_kernels_of_our_own(tiny_model: Path) -> None:
    config = TargetConfig(model_path=str(tiny_model), lora_modules={"one": "/adapters/one"}, weights="float32")
    with refuses(ConfigurationError, "verifier.lora_modules"):
        choose_kernels(load_whole(config), config, find=lambda _: None)
