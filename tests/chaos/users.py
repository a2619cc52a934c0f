"""Users who stream while something breaks, and what they see of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Protocol

import httpx2

import outrider
from tests.chaos.cells import ASKED, CROWD, HTTP, OVERLOAD, Plan, asked_by, options
from tests.chaos.history import AFTERWARDS, DONE, FAILED, FAULT, HEALED, TOKENS, UNSETTLED, History, Record

STREAM_S = 90.0
# A request that comes after the fault must be answered within this time.
RECOVERY_S = 180.0


class Arrangement(Protocol):
    """Components that serve, and that can be broken."""

    @property
    def place(self) -> str:
        """Its name in plans."""

    def client(self) -> outrider.AsyncClient:
        """A new client that asks once; where it finds the service may change while a fault is mended."""

    def web(self) -> httpx2.AsyncClient | None:
        """A new client of HTTP whose base is the service's URL; None: there is no HTTP."""

    async def fail(self, plan: Plan, streams_ended: asyncio.Event) -> None:
        """Break what the plan says, wait, and mend it."""

    async def unsettled(self, plan: Plan) -> list[str]:
        """What is not as it should be again, a line each, once it has had time and nobody has helped it."""


async def run_plan(arrangement: Arrangement, plan: Plan, expected: Mapping[str, tuple[int, ...]]) -> Record:
    """Let users stream, break something, mend it, and see that requests are answered again."""
    history = History()
    begin, ended = asyncio.Event(), asyncio.Event()
    names = [*ASKED, *([HTTP] if arrangement.web() is not None else [])]
    crowd = CROWD if plan.cell.beside == OVERLOAD else ()

    def seen(name: str, tokens: list[int]) -> None:
        history.add(TOKENS, name, tokens)
        shown = sum(len(event.tokens) for event in history.events if event.stream == name)
        if name in names and plan.after and shown >= plan.after:
            begin.set()

    async def watch(name: str) -> None:
        try:
            await (_read_http if name == HTTP else _read_grpc)(arrangement, name, seen)
            history.add(DONE, name)
        except (outrider.OutriderError, httpx2.HTTPError, _HttpFailure) as error:
            history.add(FAILED, name, text=f"{type(error).__name__}: {error}")
        if name in names:
            begin.set()

    users = [asyncio.create_task(watch(name)) for name in names]
    if not plan.after:
        begin.set()
    await begin.wait()
    history.add(FAULT, text=str(plan.cell))
    mending = asyncio.create_task(arrangement.fail(plan, ended))
    more = [asyncio.create_task(watch(name)) for name in crowd]
    newcomer = asyncio.create_task(_until_answered(arrangement, history))
    await asyncio.gather(*users, *more)
    ended.set()
    await mending
    history.add(HEALED)
    await newcomer
    for line in await arrangement.unsettled(plan):
        history.add(UNSETTLED, text=line)
    asked = {name: expected[asked_by(name)] for name in (*names, *crowd)}
    return Record(plan, {**asked, AFTERWARDS: expected["greedy"]}, history.events)


async def _read_grpc(arrangement: Arrangement, name: str, seen: Any) -> None:
    async with (
        arrangement.client() as client,
        client.stream(**options(name), timeout_s=STREAM_S) as stream,
    ):
        async for chunk in stream:
            seen(name, chunk.token_ids)


class _HttpFailure(Exception):
    """An error that HTTP told."""


async def _read_http(arrangement: Arrangement, name: str, seen: Any) -> None:
    asked = options(name)
    body = {
        **{field: value for field, value in asked.items() if field not in ("token_ids", "strategy")},
        "prompt": asked["token_ids"], "stream": True, "return_token_ids": True, "speculation": {"strategy": asked["strategy"]},
    }  # fmt: skip
    web = arrangement.web()
    assert web is not None
    async with web as client, client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise _HttpFailure(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise _HttpFailure(str(event["error"]))
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        seen(name, choice["token_ids"])
        raise _HttpFailure("the stream ended before [DONE]")


async def _until_answered(arrangement: Arrangement, history: History) -> None:
    """Ask anew, each time as a new client, until a request is answered."""
    since = time.monotonic()
    while True:
        try:
            async with arrangement.client() as client:
                answer = await client.generate(**options("greedy"), timeout_s=10.0)
            history.add(TOKENS, AFTERWARDS, answer.token_ids)
            history.add(DONE, AFTERWARDS)
            return
        except outrider.OutriderError as error:
            if time.monotonic() - since > RECOVERY_S:
                history.add(FAILED, AFTERWARDS, text=str(error))
                return
            await asyncio.sleep(0.2)
