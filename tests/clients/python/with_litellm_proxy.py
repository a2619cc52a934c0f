# /// script
# dependencies = ["litellm[proxy]==1.108.7"]
# ///
"""LiteLLM's proxy, asked by OpenAI's client, over chat completions."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from asked import CALL, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, TOOL, run, user
from openai import OpenAI

_SECRET = "sk-" + secrets.token_hex(16)


@contextmanager
def _proxy(url):
    """A proxy in front of the server, as a client sees it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    behind = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY}
    config = Path(os.environ["CLIENT_FOLDER"], "proxy.json")
    config.write_text(
        json.dumps(
            {
                "model_list": [{"model_name": "behind", "litellm_params": behind}],
                "general_settings": {"master_key": _SECRET},
            }
        )
    )
    program = str(Path(sys.executable).with_name("litellm"))
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        for _ in range(240):
            time.sleep(0.5)
            try:
                assert process.poll() is None, "the proxy has ended"
                urlopen(f"http://127.0.0.1:{port}/health/liveliness").close()
                break
            except OSError:
                continue
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=_SECRET, max_retries=0)
        yield lambda text, tokens, **more: client.chat.completions.create(
            model="behind", messages=user(text), temperature=0, max_tokens=tokens, **more
        )
    finally:
        process.terminate()
        process.wait()


def default(url):
    with _proxy(url) as ask:
        return ask(QUESTION, SHORT).choices[0].message.content


def stream(url):
    with _proxy(url) as ask:
        chunks = ask(QUESTION, SHORT, stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


def tools(url):
    with _proxy(url) as ask:
        function = ask(CALL, LONG, tools=[TOOL]).choices[0].message.tool_calls[0].function
        return {"name": function.name, "arguments": json.loads(function.arguments)}


def structured(url):
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    with _proxy(url) as ask:
        return json.loads(ask(QUESTION, LONG, response_format=form).choices[0].message.content)


run(default, stream, tools, structured)
