"""The passwords of the chart's Redis: any characters may be in them, and each opens what its user needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import redis

from retrieval_index.store import IndexStore
from speculation.errors import Unavailable
from tests.drafters.indexes import build
from tests.k8s.chart import of_kind, render
from tests.k8s.manifest_cases import EVERYTHING
from tests.running.ports import free_port
from tests.servers.redis_servers import until_it_answers


def _publish_and_follow(port: int, reader: str, publisher: str, folder: Path) -> None:
    """As ``outrider index publish`` and a retrieval service do, each with the URL and the password of its own user."""
    if not (index := folder / "index").exists():
        build(index, ["a text and more of it"])
    with (
        IndexStore(f"redis://publisher@127.0.0.1:{port}", "default", publisher) as writing,
        IndexStore(f"redis://reader@127.0.0.1:{port}", "default", reader) as reading,
    ):
        version = writing.publish(index)
        assert reading.live() == version
        assert reading.fetch(version, folder / "cache").is_dir()
        with pytest.raises(Unavailable, match="permission"):
            reading.promote(version)
    with IndexStore(f"redis://reader@127.0.0.1:{port}", "default", publisher) as wrong, pytest.raises(Unavailable):
        wrong.live()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "password", ["""quote " and ' and \\ and $HOME and `id`""", "a/b@c:d#e?f%20", "two words", "plain", "grün"]
)
def test_redis_takes_the_password_as_it_is(password: str, tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    (workload,) = (each for each in of_kind(render(EVERYTHING, {"redis": {"command": "redis-server"}}), "StatefulSet"))
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    port = free_port()
    (script,) = container["args"]
    here = script.replace("--dir /data", f"--dir {tmp_path}").replace("6379", str(port))
    passwords = {"PASSWORD": password, "READER_PASSWORD": f"r{password}", "PUBLISHER_PASSWORD": f"p{password}"}
    process = subprocess.Popen([*container["command"], here], env={**os.environ, **passwords}, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, password=password) as client:
            until_it_answers(client)
            assert client.ping()
        _publish_and_follow(port, f"r{password}", f"p{password}", tmp_path)
        with redis.Redis(port=port, password="other") as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
    finally:
        # As a pod is stopped: the signal goes to the container's first process.
        process.terminate()
        process.wait(10)
    with redis.Redis(port=port, password=password) as client, pytest.raises(redis.exceptions.ConnectionError):
        client.ping()
