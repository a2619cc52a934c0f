"""What is recalled of a tenant that has been forgotten meanwhile reaches nobody, however many tenants there are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from services.drafter.sessions import shared_answers
from services.drafter.sessions.shared_answers import SharedAnswers
from speculation.messages import RecalledAnswers
from tests.running.patience import until


class SlowStore:
    """Answers once it may."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def recall(self, tenant: str, after: str, drafter: str) -> RecalledAnswers:
        await self.go_on.wait()
        return RecalledAnswers(generation=1, answers=((5, 6),), last="1-1", more=False)

    async def keep(self, tenant: str, generation: int, drafter: str, tokens: Sequence[int]) -> bool:
        raise NotImplementedError

    async def forget(self, tenant: str) -> None:
        pass


def session(tenant: str) -> Any:
    return SimpleNamespace(tenant=tenant, generation=None, answer=[])


async def test_who_comes_while_the_store_answers_all_others_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_answers, "_MOST_TENANTS", 2)
    monkeypatch.setattr(shared_answers, "_MOST_CALLS", 2)
    store = SlowStore()

    async def told(*_: object) -> None:
        pass

    shared = SharedAnswers(store, told, told)
    for tenant in "abc":
        shared.begin(session(tenant))
    assert list(shared._tenants) == ["a", "b", "c"]
    store.go_on.set()
    await until(lambda: not shared._calls)


async def test_a_tenant_is_forgotten_though_many_others_have_come_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_answers, "_MOST_TENANTS", 2)
    store, taken = SlowStore(), list[str]()

    async def take(tenant: str, answers: Sequence[Sequence[int]]) -> None:
        taken.append(tenant)

    async def drop(tenant: str) -> None:
        pass

    shared = SharedAnswers(store, take, drop)
    for tenant in "abcde":
        shared.begin(session(tenant))
    # Their calls have begun.
    await asyncio.sleep(0)
    await shared.forget("a")
    store.go_on.set()
    await until(lambda: not shared._calls)
    assert taken == ["b", "c", "d", "e"]
    # And those whose turn is longest ago are not remembered for ever.
    shared.begin(session("f"))
    await until(lambda: not shared._calls)
    shared.begin(session("g"))
    assert len(shared._tenants) == 2
