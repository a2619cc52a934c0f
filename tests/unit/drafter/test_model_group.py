"""A model that drafts: what becomes of one that cannot be made."""

from __future__ import annotations

import asyncio
import logging

import pytest

from services.drafter.sessions.model_group import ModelGroup
from services.drafter.sources.interfaces import ModelSource
from speculation.errors import ConfigurationError
from tests.drafters.drafter_sessions import opening
from tests.running.patience import PATIENCE_S
from tests.running.refusals import refuses


async def test_weights_that_are_refused_are_looked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """They may be large, and what is wrong with them is said in one line, not in a stack for every request."""
    tries = 0

    def make() -> ModelSource:
        nonlocal tries
        tries += 1
        raise ConfigurationError("drafter.models: made for another target")

    group = ModelGroup("draft_model", make)
    for number in range(3):
        group.open(opening(f"s{number}"))
    async with asyncio.timeout(PATIENCE_S):
        await group.ended()
    assert tries == 1
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "draft_model cannot draft until the drafter is started anew: drafter.models" in told.getMessage()
    assert told.exc_info is None
    with refuses(ConfigurationError, says="made for another target"):
        await group.load()
