"""LoRA adapters at both doors: requests ask for one by the name of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from outrider import Client, NotFound
from tests.kernels.kernels_here import needs_kernels
from tests.servers.http_service import HttpService, http_served
from tests.tiny_models.lora import make_adapter

pytestmark = [
    pytest.mark.xdist_group("adapters at the doors"),
    needs_kernels,
]

CLIENT = httpx2.Client(timeout=60)
PROMPT = "Once upon a time there was a fox that lived in the woods, and the fox was quick and brown. " * 3


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    folder = tmp_path_factory.mktemp("adapters")
    one, two = (make_adapter(folder / f"{seed}", tiny_model, seed=seed) for seed in (1, 2))
    with http_served(tiny_model, f"verifier.lora_modules={{billing/de: {one}, two: {two}}}") as running:
        yield running


def completed(service: HttpService, model: str | None, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "model": model, **fields}
    answer = CLIENT.post(f"{service.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_adapters_are_listed_behind_their_model(service: HttpService) -> None:
    listed = CLIENT.get(f"{service.url}/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("tiny", None), ("billing/de", "tiny"), ("two", "tiny")]
    assert CLIENT.get(f"{service.url}/v1/models/billing/de").json() == listed[1]
    with Client(service.grpc) as client:
        (model,) = client.models()
    assert (model.name, model.adapters) == ("tiny", ("billing/de", "two"))


def test_each_name_has_its_own_answers_at_both_doors(service: HttpService) -> None:
    texts = {}
    with Client(service.grpc) as client:
        for name in ("tiny", "billing/de", "two"):
            answer = completed(service, name)
            texts[name] = answer["choices"][0]["text"]
            assert answer["model"] == name
            over_grpc = client.generate(PROMPT, max_tokens=20, temperature=0, model=name)
            assert (over_grpc.text, over_grpc.model) == (texts[name], name)
    assert len(set(texts.values())) == 3
    assert completed(service, None)["choices"][0]["text"] == texts["tiny"]
    chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0}
    chats = [CLIENT.post(f"{service.url}/v1/chat/completions", json={**chat, "model": name}).json() for name in texts]
    assert [each["model"] for each in chats] == [*texts]
    assert len({each["choices"][0]["message"]["content"] for each in chats}) == 3
    assert len({each["system_fingerprint"] for each in chats}) == 3


def test_computed_prompts_are_shared_within_an_adapter_alone(service: HttpService) -> None:
    prompt = f"Of this text alone. {PROMPT}"
    cached = [
        completed(service, name, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for name in ("two", "billing/de", "tiny", "two")
    ]
    assert cached[:3] == [0, 0, 0] and cached[3] > 0


def test_other_names_are_refused(service: HttpService) -> None:
    wrong = CLIENT.post(f"{service.url}/v1/completions", json={"prompt": "a", "model": "three"})
    assert wrong.status_code == 404 and "tiny, billing/de, two" in wrong.json()["error"]["message"]
    assert CLIENT.get(f"{service.url}/v1/models/three").status_code == 404
    with Client(service.grpc) as client, pytest.raises(NotFound, match="billing/de"):
        client.generate("a", max_tokens=1, model="three")
