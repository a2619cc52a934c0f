"""The runbook: every alert has a section that says what to do, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cluster.settings import config

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
CHART = ROOT / "k8s" / "outrider"


def sections() -> dict[str, str]:
    parts = re.split(r"^(?:##|###) (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    groups = yaml.safe_load((CHART / "alerts" / "outrider.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert len(alerts) >= 11
    assert {name for name in sections() if name.startswith("Outrider")} == alerts
    for alert in alerts:
        text = sections()[alert]
        assert "*Do:*" in text or "*Look at*" in text, alert


def test_the_tasks_of_an_operator_are_there() -> None:
    for task in (
        "Install", "Upgrade", "Roll back", "Rotate keys", "Rotate certificates", "Drain a node", "Change an index", "Change a model",
    ):  # fmt: skip
        assert len(sections()[task]) > 300, task


def known(tree: dict[str, object], path: list[str]) -> bool:
    """Whether a path leads somewhere in the values; below ``settings`` the settings' classes decide."""
    here: object = tree
    for part in path:
        if not isinstance(here, dict) or part not in here:
            return False
        here = here[part]
    return True


def test_the_values_and_settings_that_it_names_exist() -> None:
    named = set(re.findall(r"`([a-zA-Z_]+(?:\.[a-zA-Z_]+)+)(?::[^`]*)?`", PAGE))
    fields = config.Settings.model_fields
    sections_of_settings = {word for word in named if word.removeprefix("settings.").split(".")[0] in fields}
    assert len(sections_of_settings) >= 12
    for word in sections_of_settings:
        section: object = config.Settings
        for part in word.removeprefix("settings.").split("."):
            model = config.Settings if section is config.Settings else section
            found = getattr(model, "model_fields", {}).get(part)
            if found is None and part == "name":
                break
            assert found is not None, word
            kinds = [found.annotation, *getattr(found.annotation, "__args__", ())]
            section = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    if not (CHART / "values.yaml").is_file():
        pytest.skip("the chart is not here")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for word in named - sections_of_settings:
        if word.split(".")[0] in values:
            assert known(values, word.split(".")), word
