"""LoRA adapters that come and go while others are served."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from speculation import limits
from tests.kernels.kernels_here import needs_kernels
from tests.servers.http_service import HttpService, http_served
from tests.tiny_models.lora import WEIGHTS, make_adapter

pytestmark = [
    pytest.mark.xdist_group("adapters come and go"),
    needs_kernels,
]

CLIENT = httpx2.Client(timeout=60)
PROMPT = "Once upon a time there was a fox that lived in the woods, and the fox was quick and brown. " * 3


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of adapters that may be loaded; one that may not lies beside it."""
    made = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        make_adapter(made / "allowed" / f"{seed}", tiny_model, seed=seed)
    make_adapter(made / "elsewhere", tiny_model, seed=3)
    (made / "allowed" / "linked").symlink_to(made / "elsewhere")
    return made / "allowed"


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)], ids=["one process", "two stages"])
def service(tiny_model: Path, folder: Path, request: pytest.FixtureRequest) -> Iterator[HttpService]:
    flags = (
        f"verifier.lora_folders=[{folder}]", f"verifier.lora_modules={{kept: {folder / '2'}}}",
        f"verifier.stages={request.param}",
    )  # fmt: skip
    with http_served(tiny_model, *flags) as running:
        yield running


def asked(service: HttpService, path: str, **body: Any) -> httpx2.Response:
    return CLIENT.post(f"{service.url}{path}", json=body)


def load(service: HttpService, name: str, folder: object) -> httpx2.Response:
    return asked(service, "/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))


def unload(service: HttpService, name: str) -> httpx2.Response:
    return asked(service, "/v1/unload_lora_adapter", lora_name=name)


def text_of(service: HttpService, model: str) -> str:
    answer = asked(service, "/v1/completions", prompt=PROMPT, max_tokens=20, temperature=0, model=model)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def names(service: HttpService) -> list[str]:
    return [model["id"] for model in CLIENT.get(f"{service.url}/v1/models").json()["data"]]


def test_it_comes_and_goes_and_another_one_takes_its_name(service: HttpService, folder: Path) -> None:
    plain, kept = text_of(service, "tiny"), text_of(service, "kept")
    loaded = load(service, "passing", folder / "1")
    assert (loaded.status_code, loaded.json()) == (200, {"id": "passing", "object": "model", "deleted": False})
    assert names(service) == ["tiny", "kept", "passing"]
    first = text_of(service, "passing")
    assert len({plain, kept, first}) == 3
    # The same one again changes nothing.
    assert load(service, "passing", folder / "1").status_code == 200
    other = load(service, "passing", folder / "2")
    assert other.status_code == 400 and other.json()["error"]["param"] == "lora_name"
    gone = unload(service, "passing")
    assert (gone.status_code, gone.json()) == (200, {"id": "passing", "object": "model", "deleted": True})
    assert names(service) == ["tiny", "kept"]
    missing = asked(service, "/v1/completions", prompt="a", model="passing")
    assert missing.status_code == 404
    assert load(service, "passing", folder / "2").status_code == 200
    assert text_of(service, "passing") == kept
    assert unload(service, "passing").status_code == 200
    assert [text_of(service, name) for name in ("tiny", "kept")] == [plain, kept]


@pytest.mark.parametrize(
    ("name", "where", "field"),
    [
        ("new", "../elsewhere", "lora_path"),
        ("new", "linked", "lora_path"),
        ("new", "/", "lora_path"),
        ("new", "nothing there", "lora_path"),
        ("two words", "1", "lora_name"),
        ("tiny", "1", "lora_name"),
    ],
)
def test_what_is_not_loaded(service: HttpService, folder: Path, name: str, where: str, field: str) -> None:
    refused = load(service, name, folder / where)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field
    assert names(service) == ["tiny", "kept"]


def test_paths_that_are_not_absolute(service: HttpService) -> None:
    assert load(service, "new", "1").json()["error"]["param"] == "lora_path"


def test_one_that_half_arrived_or_is_of_another_model(service: HttpService, folder: Path, tiny_model: Path) -> None:
    made = make_adapter(folder / f"damaged {len(list(folder.iterdir()))}", tiny_model, seed=9)
    whole = (made / WEIGHTS).read_bytes()
    (made / WEIGHTS).write_bytes(whole[:-10])
    assert "cut off" in load(service, "damaged", made).json()["error"]["message"]
    (made / WEIGHTS).write_bytes(whole)
    tensors = load_file(made / WEIGHTS)
    save_file({name: torch.cat([each, each], 1) for name, each in tensors.items()}, made / WEIGHTS)
    assert load(service, "damaged", made).status_code == 400
    assert names(service) == ["tiny", "kept"]


def test_who_is_not_there_cannot_go(service: HttpService) -> None:
    for name in ("tiny", "nobody"):
        refused = unload(service, name)
        assert refused.status_code == 404 and refused.json()["error"]["param"] == "lora_name"
    assert asked(service, "/v1/unload_lora_adapter").status_code == 400


def _streamed(service: HttpService, model: str, ended: list[str], begun: threading.Event) -> None:
    """An answer of some seconds."""
    body = {"prompt": PROMPT, "max_tokens": 120, "temperature": 0, "ignore_eos": True, "model": model, "stream": True,
            "speculation": {"strategy": "autoregressive"}}  # fmt: skip
    text = ""
    with httpx2.Client(timeout=60) as client, client.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                begun.set()
    ended.append(text)


def test_what_is_in_use_is_waited_for(service: HttpService, folder: Path) -> None:
    assert load(service, "busy", folder / "1").status_code == 200
    expected: list[str] = []
    _streamed(service, "busy", expected, threading.Event())
    ended: list[str] = []
    begun = threading.Event()
    running = threading.Thread(target=_streamed, args=(service, "busy", ended, begun))
    running.start()
    assert begun.wait(30)
    gone = unload(service, "busy")
    # The answer has ended first, and whole.
    running.join(30)
    assert gone.status_code == 200 and ended == expected
    assert names(service) == ["tiny", "kept"]


def test_what_is_in_use_for_too_long_stays(service: HttpService, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNLOAD_S", 0.01)
    assert load(service, "busy", folder / "1").status_code == 200
    ended: list[str] = []
    begun = threading.Event()
    running = threading.Thread(target=_streamed, args=(service, "busy", ended, begun))
    running.start()
    assert begun.wait(30)
    refused = unload(service, "busy")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "lora_name"
    running.join(30)
    assert text_of(service, "busy") and ended[0]
    assert unload(service, "busy").status_code == 200


def test_who_may_change_what_is_served(tiny_model: Path, folder: Path, tmp_path: Path) -> None:
    keys = {"a key of an operator": ["admin"], "a key of a user": ["generate"]}
    file = tmp_path / "keys.yaml"
    records = [{"hash": hash_key(key), "id": f"key-{at}", "scopes": scopes} for at, (key, scopes) in enumerate(keys.items())]
    file.write_text(json.dumps(records))
    config = HttpConfig(port=0, public=PublicServerConfig(port=0, keys_file=file))
    with http_served(tiny_model, f"verifier.lora_folders=[{folder}]", config=config) as service:
        for key, status in (("a key of a user", 403), ("a key of an operator", 200)):
            for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
                body = {"lora_name": "one"} | ({"lora_path": str(folder / "1")} if "unload" not in path else {})
                answer = CLIENT.post(f"{service.url}{path}", json=body, headers={"x-api-key": key})
                assert answer.status_code == status, answer.text
