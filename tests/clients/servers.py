"""Servers with the default model: as it is, and with a chat template that has tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from cluster.models.target import resolve
from cluster.settings.config import load
from tests.running.ports import free_port

_STARTS_S = 300
_TEMPLATE = Path(__file__).with_name("tools_template.jinja")


@dataclass(frozen=True)
class Server:
    """A running server; ``url`` is where its paths begin."""

    model: str
    url: str


@contextmanager
def served(cache: Path, *, with_tools: bool) -> Iterator[Server]:
    """A service in a process of its own."""
    settings = load(environ=dict(os.environ))
    folder = resolve(settings.model, settings.cache_dir).path
    model = "smollm2-with-tools" if with_tools else "smollm2"
    if with_tools:
        folder = _with_template(folder, cache / model)
    port = free_port()
    command = [sys.executable, "-m", "cli", "serve", "--in-process", "--model", str(folder)]
    for setting in ("port=0", f"http_port={port}", f"served_model_name=[{model}]"):
        command += ["--set", f"server.{setting}"]
    log = cache / f"{model}.log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(f"{url}/ready", process, log)
            yield Server(model, url)
        finally:
            process.terminate()


def _with_template(folder: Path, made: Path) -> Path:
    """The same model's folder, with another chat template."""
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for file in folder.iterdir():
        (made / file.name).symlink_to(file)
    (made / "chat_template.jinja").unlink()
    shutil.copy(_TEMPLATE, made / "chat_template.jinja")
    return made


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _STARTS_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx2.get(url, trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server has not started: {log.read_text()[-2000:]}")
