"""What `helm test` runs, against a service in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from services.api.http.ops_listener import serve_ops
from tests.k8s.chart import CHART, needs_helm, one, render
from tests.servers.service import served

SCRIPT = CHART / "files" / "ask_the_service.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ask_the_service", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def run(**environment: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, as in its pod."""
    known = {name: value for name, value in os.environ.items() if name not in ("SERVICE", "API_KEY")}
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(SCRIPT)],
        env=known | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


async def ready() -> bool:
    return True


async def test_it_compares_tokens(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _):
        ops = await serve_ops("127.0.0.1", 0, lambda: b"", ready)
        url = f"http://{ops.address}/ready"
        try:
            said = await run(READY_URL=url, SERVICE=address, STRATEGY="prompt_lookup", TLS="no", API_KEY="any")
            assert said.returncode == 0, said.stderr
            assert said.stdout.count("prompt_lookup equals plain decoding") == 4
            said = await run(READY_URL=url, SERVICE=address, STRATEGY="rest", TLS="no", API_KEY="any")
            assert said.returncode == 1
            assert "tests.strategy is rest: tiny is served with" in said.stderr
            said = await run(READY_URL=url, SERVICE=address, STRATEGY="rest", TLS="no")
            assert "tests.apiKeySecretName is empty" in said.stderr
            said = await run(READY_URL=url, STRATEGY="rest")
            assert said.returncode == 0
            assert "tokens are not compared" in said.stdout
        finally:
            await ops.stop()


async def test_it_notices_other_tokens(tiny_model: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import outrider

    genuine = outrider.Client.generate

    def other(self: outrider.Client, prompt: str, **options: object) -> outrider.Generation:
        # As if a strategy had another seed than plain decoding.
        if options["strategy"] != "autoregressive" and options["temperature"]:
            options["seed"] = 8
        return genuine(self, prompt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(outrider.Client, "generate", other)
    async with served(tiny_model) as (address, _):
        with pytest.raises(SystemExit, match=r"prompt_lookup says .* and plain decoding"):
            await asyncio.to_thread(script.compare, address, "prompt_lookup", None, False)


def test_it_gives_up(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="is not ready after 0 s"):
        script.wait_until_ready("http://127.0.0.1:9/ready", 0)


@needs_helm
def test_the_pod_runs_it() -> None:
    made = render("one-h100")
    (container,) = one(made, "Pod")["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["SERVICE"] == "demo-outrider:50051"
    assert environment["READY_URL"] == "http://demo-outrider-headless:9464/ready"
    assert one(made, "ConfigMap", "-test")["data"]["ask_the_service.py"] == SCRIPT.read_text()
    (demo,) = one(render("cpu-demo"), "Pod")["spec"]["containers"]
    assert "SERVICE" not in {each["name"] for each in demo["env"]}
