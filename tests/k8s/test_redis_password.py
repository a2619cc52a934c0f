"""The password of the chart's Redis: any characters may be in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import redis

from tests.k8s.chart import of_kind, render
from tests.k8s.manifest_cases import EVERYTHING
from tests.ports import free_port
from tests.redis_servers import until_it_answers


@pytest.mark.parametrize(
    "password", ["plain", "a/b@c:d#e?f%20", "two words", """quote " and ' and \\ and $HOME and `id`""", "grün"]
)
def test_redis_takes_the_password_as_it_is(password: str, tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    (workload,) = (each for each in of_kind(render(EVERYTHING, {"redis": {"command": "redis-server"}}), "StatefulSet"))
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    port = free_port()
    (script,) = container["args"]
    here = script.replace("--dir /data", f"--dir {tmp_path}").replace("6379", str(port))
    process = subprocess.Popen(
        [*container["command"], here], env={**os.environ, "PASSWORD": password}, stdout=subprocess.DEVNULL
    )
    try:
        with redis.Redis(port=port, password=password) as client:
            until_it_answers(client)
            assert client.ping()
        with redis.Redis(port=port, password="other") as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
    finally:
        # As a pod is stopped: the signal goes to the container's first process.
        process.terminate()
        process.wait(10)
    with redis.Redis(port=port, password=password) as client, pytest.raises(redis.exceptions.ConnectionError):
        client.ping()
