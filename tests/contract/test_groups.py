"""Requests that name a group draft from each other's answers, through every door; no other tenant can name it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import outrider
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.drafter.service import DrafterService
from speculation.messages import Draft, DraftFailure, OpenSession
from tests.servers.doors import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.servers.http_service import HttpService, http_served

USER = {"role": "user", "content": "the lazy fox"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 4},
    COMPLETIONS: {"prompt": "fox", "max_tokens": 4},
    RESPONSES: {"input": "fox", "max_output_tokens": 4, "store": False},
    MESSAGES: {"messages": [USER], "max_tokens": 4},
}
KEYS = {"acme": "a key of some length", "other": "another key of length"}


class Opened(list[str]):
    """The groups of the sessions that drafters opened."""

    def last(self, count: int = 1) -> list[str]:
        found = self[-count:]
        self.clear()
        return found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    groups, as_ever = Opened(), DrafterService.open

    async def noted(self: DrafterService, message: OpenSession) -> Draft | DraftFailure | None:
        groups.append(message.group)
        return await as_ever(self, message)

    monkeypatch.setattr(DrafterService, "open", noted)
    return groups


@pytest.fixture(scope="module")
def two_tenants(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("".join(f"- {{hash: {hash_key(key)}, id: {name}, tenant: {name}}}\n" for name, key in KEYS.items()))
    with http_served(tiny_model, config=HttpConfig(port=0, public=PublicServerConfig(keys_file=keys))) as service:
        yield service


def post(service: HttpService, path: str, *, tenant: str = "acme", **fields: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    return httpx2.post(service.url + path, json=BODIES[path] | fields, headers=headers, timeout=60)


def grouped(service: HttpService, path: str = COMPLETIONS, group: str = "task 17", **fields: Any) -> None:
    answer = post(service, path, **{"speculation": {"group": group}} | fields)
    assert answer.status_code == 200, answer.text


def test_every_door_names_the_same_group(both_entries: HttpService, two_tenants: HttpService, opened: Opened) -> None:
    found = []
    for path in BODIES:
        grouped(two_tenants, path)
        found += opened.last()
    assert len(set(found)) == 1 and found[0] and "task" not in found[0]
    with outrider.Client(both_entries.grpc) as client:
        client.generate("fox", max_tokens=4, group="task 17")
        client.generate("fox", max_tokens=4, group="task 18")
        client.generate("fox", max_tokens=4, group="")
        one, other, none = opened.last(3)
    assert one and other and one != other and not none


def test_a_group_is_its_tenants_and_its_salts(two_tenants: HttpService, opened: Opened) -> None:
    grouped(two_tenants)
    grouped(two_tenants, tenant="other")
    grouped(two_tenants, cache_salt="a")
    grouped(two_tenants, cache_salt="a", tenant="other")
    assert len(set(opened.last(4))) == 4


def test_answers_of_one_request_join_the_group_that_it_names(two_tenants: HttpService, opened: Opened) -> None:
    grouped(two_tenants)
    (alone,) = opened.last()
    grouped(two_tenants, n=2, seed=1)
    assert opened.last(2) == [alone, alone]
    grouped(two_tenants, n=2, seed=1, group="")
    one, other = opened.last(2)
    assert one == other and one not in ("", alone)


def test_it_changes_no_token(two_tenants: HttpService) -> None:
    sampled = {"temperature": 0.8, "seed": 7, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    plain, drafted = (
        post(two_tenants, COMPLETIONS, speculation=asked, **sampled).json()["choices"][0]["token_ids"]
        for asked in ({"strategy": "autoregressive"}, {"group": "task 17"})
    )
    assert plain == drafted and len(plain) == 24


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("speculation", "value", "allowed"),
    [
        ({"group": "g" * 65}, "65 characters", "at most 64 characters"),
        ({"group": 17}, "17", "a text"),
        ({"group": "g", "strategy": "prompt_lookup"}, "g", "only auto, blend, suffix draft from other answers"),
        ({"group": "g", "strategy": "autoregressive"}, "g", "only auto, blend, suffix draft from other answers"),
        ({"group": "g", "num_speculative_tokens": 0}, "g", "nothing is drafted"),
    ],
)
def test_a_group_that_would_be_ignored_is_refused(
    two_tenants: HttpService, path: str, speculation: dict[str, Any], value: str, allowed: str
) -> None:
    answer = post(two_tenants, path, speculation=speculation)
    error = answer.json()["error"]
    assert answer.status_code == 400 and "speculation.group" in error["message"], answer.text
    assert value in error["message"] and allowed in error["message"]


def test_it_is_refused_over_grpc_as_well(both_entries: HttpService) -> None:
    with outrider.Client(both_entries.grpc) as client:
        for options, words in (
            ({"group": "g" * 65}, "65 characters"),
            ({"group": "g", "strategy": "lookahead"}, "unset with the strategy lookahead"),
        ):
            with pytest.raises(outrider.InvalidArgument, match=words) as raised:
                client.generate("fox", max_tokens=4, **options)
            assert raised.value.field == "speculation.group"


def test_a_comparison_leaves_it_out(both_entries: HttpService) -> None:
    with outrider.Client(both_entries.grpc) as client:
        answer = client.generate("fox", max_tokens=8, group="g", compare=["prompt_lookup", "autoregressive"])
    assert [each.strategy for each in answer.comparisons] == ["prompt_lookup", "autoregressive"]
