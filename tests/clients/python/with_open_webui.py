# /// script
# dependencies = ["open-webui==0.12.4"]
# [tool.uv]
# override-dependencies = ["torch ; sys_platform == 'never'"]
# [tool.outrider]
# tools = "Not tried: its tools are written in its pages."
# ///
"""Open WebUI, its server asked as its pages ask it, over chat completions."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from asked import COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, run, user


def _open(url, body=None, token=""):
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    return urlopen(Request(url, None if body is None else json.dumps(body).encode(), headers))


@contextmanager
def _webui(url):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(os.environ["CLIENT_FOLDER"], secrets.token_hex(4))
    folder.mkdir()
    off = dict.fromkeys(
        ("WEBUI_AUTH", "ENABLE_OLLAMA_API", "ENABLE_VERSION_UPDATE_CHECK", "ENABLE_PERSISTENT_CONFIG"), "False"
    )
    where = {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "DATA_DIR": str(folder)}
    variables = {
        **os.environ,
        **off,
        **where,
        "WEBUI_SECRET_KEY": secrets.token_hex(16),
        "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai",
    }
    program = str(Path(sys.executable).with_name("open-webui"))
    command = [program, "serve", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=variables, stdout=sys.stderr)
    site = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            time.sleep(0.5)
            assert process.poll() is None, "Open WebUI has ended"
            try:
                _open(f"{site}/health").close()
                break
            except OSError:
                continue
        token = json.load(_open(f"{site}/api/v1/auths/signin", {"email": "admin@localhost", "password": "admin"}))["token"]
        assert MODEL in [each["id"] for each in json.load(_open(f"{site}/api/models", token=token))["data"]]
        yield lambda tokens, **more: _open(
            f"{site}/api/chat/completions",
            {"model": MODEL, "messages": user(QUESTION), "temperature": 0, "max_tokens": tokens, **more},
            token,
        )
    finally:
        process.terminate()
        process.wait()


def default(url):
    with _webui(url) as ask:
        return json.load(ask(SHORT, stream=False))["choices"][0]["message"]["content"]


def stream(url):
    with _webui(url) as ask:
        lines = [line.decode().strip().removeprefix("data: ") for line in ask(SHORT, stream=True)]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    return [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk.get("choices")]


def structured(url):
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    with _webui(url) as ask:
        return json.loads(json.load(ask(LONG, stream=False, response_format=form))["choices"][0]["message"]["content"])


run(default, stream, structured)
