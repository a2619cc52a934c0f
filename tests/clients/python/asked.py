"""What every client is asked for, and how it is run: ``uv run --script FILE`` prints one JSON line a feature.

A feature is a function of the URL of a server, whose paths begin there. It gives what a user of the client gets:

    default     the text of an answer
    stream      its pieces
    tools       the call that the model makes: {"name": ..., "arguments": {...}}
    structured  an object of the schema COLOUR
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

MODEL = os.environ["CLIENT_MODEL"]
KEY = "none"
QUESTION = "Name three colours of a rainbow."
# The default model is too small to decide for a tool, and repeats a call that it reads.
CALL = 'Repeat: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
# Tokens of an answer; some clients take none that is cut.
SHORT, LONG, WHOLE = 24, 64, 400

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}
TOOL = {"type": "function", "function": FUNCTION}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green", "blue"]}, "warm": {"type": "boolean"}},
    "required": ["colour", "warm"],
    "additionalProperties": False,
}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def run(*features: Callable[[str], Any]) -> None:
    """Use the client for each feature, and print what comes of it."""
    for feature in features:
        name, began = feature.__name__, time.monotonic()
        try:
            told = {"gave": feature(f"{os.environ['CLIENT_URL']}/{name}")}
        except Exception as error:
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"feature": name, "seconds": round(time.monotonic() - began, 1), **told}), flush=True)
    sys.stdout.flush()
    # Threads that a client leaves behind end with it.
    os._exit(0)
