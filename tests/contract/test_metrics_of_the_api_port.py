"""/metrics of the API port, read before and after a run as `vllm bench serve` reads it for the acceptance of drafts."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from cluster.build import in_process
from cluster.entry.public import opened_entry
from cluster.models.target import ResolvedModel
from cluster.settings.config import load
from tests.servers.service import tiny_settings


def counted(text: str) -> tuple[int, int, int, dict[int, int]] | None:
    """Drafts, drafted tokens, accepted ones, and those by their position; None: the server does not draft."""
    sums = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    by_position: dict[int, int] = {}
    seen = False
    for line in text.splitlines():
        name, _, labels = line.partition("{")
        if not line.startswith("vllm:spec_decode") or not name.endswith("_total"):
            continue
        seen, value, bare = True, int(float(line.split()[-1])), name.removeprefix("vllm:spec_decode_").removesuffix("_total")
        if bare == "num_accepted_tokens_per_pos":
            position = int(labels.split('position="')[1].split('"')[0])
            by_position[position] = by_position.get(position, 0) + value
        elif bare in sums:
            sums[bare] += value
    return (*sums.values(), by_position) if seen else None  # type: ignore[return-value]


@pytest.mark.examples(2)
@pytest.mark.parametrize("names", [True, False])
async def test_it_tells_the_acceptance_of_a_run(tiny_model: Path, names: bool) -> None:
    flags = [
        "server.http_port=0",
        "server.ops_port=null",
        "server.metrics=true",
        f"metrics.names_of={'[vllm]' if names else '[]'}",
    ]
    settings = load(flags=tiny_settings(*flags), environ={})
    async with (
        in_process(settings, ResolvedModel(name="tiny", path=tiny_model)) as running,
        opened_entry(running.router, settings, running.observing) as addresses,
        httpx2.AsyncClient(base_url=addresses.http or "", timeout=60) as client,
    ):
        before = counted((await client.get("/metrics")).text)
        body = {"prompt": [40, 41, 42] * 12, "max_tokens": 60, "ignore_eos": True, "speculation": {"strategy": "suffix"}}
        answer = (await client.post("/v1/completions", json={**body, "temperature": 0})).json()
        after = counted((await client.get("/metrics")).text)
    if not names:
        assert before is None and after is None
        return
    assert before == (0, 0, 0, {}) and after is not None
    told = answer["metrics"]["speculative_decoding"]
    drafts, drafted, accepted, by_position = after
    assert (drafted, accepted) == (told["num_draft_tokens"], told["num_accepted_draft_tokens"])
    assert 0 < drafts <= told["num_spec_steps"] and sum(by_position.values()) == accepted
