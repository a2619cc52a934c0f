# /// script
# dependencies = ["llm==0.36"]
# ///
"""The command `llm`, over chat completions."""

import json
import os
import subprocess
import sys
from pathlib import Path

from asked import CALL, COLOUR, LONG, MODEL, QUESTION, SHORT, run

_WEATHER = (
    "def weather(city: str) -> str:\n    'The weather in a city.'\n    print('called with', city)\n    return 'sunny'\n"
)


def _lines(url, text, tokens, *options):
    """What the command prints, in the pieces in which it does. It fails where a model calls again and again."""
    folder = Path(os.environ["CLIENT_FOLDER"])
    able = {"can_stream": True, "supports_schema": True, "supports_tools": True}
    entry = {"model_id": "tried", "model_name": MODEL, "api_base": f"{url}/v1", **able}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    program = str(Path(sys.executable).with_name("llm"))
    wanted = ["-o", "temperature", "0", "-o", "max_tokens", str(tokens), "--no-log"]
    variables = {**os.environ, "LLM_USER_PATH": str(folder)}
    process = subprocess.Popen([program, "-m", "tried", *wanted, *options, text], env=variables, stdout=subprocess.PIPE)
    pieces = []
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        pieces.append(piece.decode())
    process.wait()
    # It ends with a newline of its own.
    pieces[-1] = pieces[-1].removesuffix("\n")
    return pieces


def default(url):
    return "".join(_lines(url, QUESTION, SHORT, "--no-stream"))


def stream(url):
    return _lines(url, QUESTION, SHORT)


def tools(url):
    told = "".join(_lines(url, CALL, LONG, "--functions", _WEATHER, "--chain-limit", "2", "--no-stream"))
    city = told.split("called with ")[1].splitlines()[0]
    return {"name": "weather", "arguments": {"city": city}}


def structured(url):
    return json.loads("".join(_lines(url, QUESTION, LONG, "--schema", json.dumps(COLOUR), "--no-stream")))


run(default, stream, tools, structured)
