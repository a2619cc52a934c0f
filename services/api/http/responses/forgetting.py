"""A router that, when a tenant is to be forgotten, forgets its stored responses as well."""

from __future__ import annotations

from services.api.http.responses.stored_responses import ResponseStore
from services.api.messages import RouterPort
from services.api.observer import PassingRouter


class ForgettingRouter(PassingRouter):
    """Implements ``RouterPort`` by another router and a store of responses."""

    def __init__(self, router: RouterPort, store: ResponseStore) -> None:
        super().__init__(router)
        self._store = store

    async def forget(self, tenant: str) -> None:
        try:
            await self._store.forget(tenant)
        finally:
            await super().forget(tenant)
