"""A drafter that another one can stand in for between two requests."""

from __future__ import annotations

from collections.abc import AsyncIterator

from speculation.columns import DraftColumns, ReportColumns
from speculation.messages import CloseSession, Draft, DraftFailure, FeatureChunk, ForgetTenant, OpenSession, StepReport
from speculation.ports import Drafter, DraftsAtOnce, DraftsTogether


class ChangingDrafter:
    """Implements ``speculation.ports.Drafter`` and ``DraftsAtOnce`` by the drafter in ``now``.

    So one loaded target serves rows whose drafters have different settings.
    """

    def __init__(self, first: Drafter) -> None:
        self.now = first

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        return await self.now.open(message)

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        return await self.now.step(message)

    def at_once(self, message: StepReport) -> Draft | DraftFailure | None:
        return self.now.at_once(message) if isinstance(self.now, DraftsAtOnce) else None

    def together(self, reports: ReportColumns) -> DraftColumns | None:
        return self.now.together(reports) if isinstance(self.now, DraftsTogether) else None

    def further(self, session_id: str) -> AsyncIterator[Draft]:
        return self.now.further(session_id)

    def features(self, message: FeatureChunk) -> None:
        self.now.features(message)

    def close(self, message: CloseSession) -> None:
        self.now.close(message)

    async def forget(self, message: ForgetTenant) -> None:
        await self.now.forget(message)
