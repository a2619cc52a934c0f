"""What a start with some settings would be refused for."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.checks import preflight
from cluster.settings.config import Settings, load
from speculation.errors import ConfigurationError


def settings_of(model: Path, tmp_path: Path, *flags: str) -> Settings:
    return load(flags=[f"model={model}", "server.port=0", f"cache_dir={tmp_path / 'cache'}", *flags], environ={})


def refused(model: Path, tmp_path: Path, *flags: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        preflight.preflight(settings_of(model, tmp_path, *flags))
    assert "\n" not in str(caught.value)
    return str(caught.value)
