"""What has been started in one process is stopped with it: a drafter beside the target, and all that a failed start leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.drafter.service import DrafterService
from services.verifier.service import VerifierService
from speculation.errors import TargetLost
from tests.servers.service import pipeline
from tests.tiny_models.draft_models import draft_beside


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[DrafterService | VerifierService]:
    """What has been stopped, in its order."""
    found: list[DrafterService | VerifierService] = []
    of_drafter, of_verifier = DrafterService.stop, VerifierService.stop

    async def stop_drafter(self: DrafterService) -> None:
        found.append(self)
        await of_drafter(self)

    async def stop_verifier(self: VerifierService) -> None:
        found.append(self)
        await of_verifier(self)

    monkeypatch.setattr(DrafterService, "stop", stop_drafter)
    monkeypatch.setattr(VerifierService, "stop", stop_verifier)
    return found


async def test_a_drafter_beside_the_target_is_stopped(
    tiny_model: Path, stopped: list[DrafterService | VerifierService]
) -> None:
    flags = (f"drafter.models=[{draft_beside(tiny_model)}]", "drafter.models_in=verifier")
    async with pipeline(tiny_model, *flags) as running:
        pass
    verifier, beside, drafter = stopped
    assert verifier is running.verifier and drafter is running.drafter
    assert isinstance(beside, DrafterService) and beside is not drafter


async def test_a_failed_start_leaves_nothing_running(
    tiny_model: Path, stopped: list[DrafterService | VerifierService], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: VerifierService, *_: object) -> None:
        raise TargetLost("planted")

    monkeypatch.setattr(VerifierService, "__init__", failing)
    with pytest.raises(TargetLost):
        async with pipeline(tiny_model):
            pass
    (drafter,) = stopped
    assert isinstance(drafter, DrafterService)
