"""What the model is called: by names of the operator's, or by its folder, whose place is nobody's business."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from cluster.models.target import ResolvedModel
from cluster.settings.component_configs import public_name
from outrider import Client, NotFound
from tests.servers.http_service import http_served

CLIENT = httpx2.Client(timeout=60)


def test_a_model_answers_by_each_of_its_names(tiny_model: Path) -> None:
    with http_served(tiny_model, "server.served_model_name=[fox, quick]") as service:
        listed = CLIENT.get(f"{service.url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["fox", "quick"]
        for asked, told in (("fox", "fox"), ("quick", "quick"), (None, "fox")):
            body = {"prompt": "a", "max_tokens": 1, "model": asked}
            assert CLIENT.post(f"{service.url}/v1/completions", json=body).json()["model"] == told
        wrong = CLIENT.post(f"{service.url}/v1/completions", json={"prompt": "a", "model": "tiny"})
        assert wrong.status_code == 404 and "fox, quick" in wrong.json()["error"]["message"]
        with Client(service.grpc) as client:
            assert client.generate("a", max_tokens=1, model="quick").model == "quick"
            with pytest.raises(NotFound):
                client.generate("a", max_tokens=1, model="tiny")


def test_a_folders_name_is_not_its_path(tmp_path: Path) -> None:
    folder, file = tmp_path / "my-model", tmp_path / "other.Q4_0.gguf"
    folder.mkdir()
    file.touch()
    assert [public_name(ResolvedModel(name=str(path), path=path)) for path in (folder, file)] == ["my-model", "other.Q4_0"]
    assert public_name(ResolvedModel(name="org/name", path=folder)) == "org/name"
