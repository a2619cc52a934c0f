"""Checks the LoRA adapters that the settings name, by their configurations alone."""

from __future__ import annotations

from pathlib import Path

from cluster.models.target import ResolvedModel
from cluster.settings import component_configs
from cluster.settings.config import Settings
from services.model_files.peft_config import read_peft_config
from speculation.adapters import check_name
from speculation.errors import ConfigurationError, InvalidArgument


def check_adapters(settings: Settings, model: ResolvedModel, *, here: bool) -> None:
    """Check names, and where they lie ``here`` the folders of the adapters.

    Raises:
        ConfigurationError: a name is no name or the model's own, or a folder holds no adapter that can be served; says why.
    """
    own = component_configs.names_of(settings, model)
    for name, folder in settings.verifier.lora_modules.items():
        try:
            check_name(name, own)
        except InvalidArgument as error:
            raise ConfigurationError(field="verifier.lora_modules", value=name or '""', allowed=error.allowed) from error
        if here:
            read_peft_config(Path(folder).expanduser())
