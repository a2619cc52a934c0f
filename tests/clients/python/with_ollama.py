# /// script
# dependencies = ["ollama==0.6.3"]
# ///
"""Ollama's client, over Ollama's chat."""

import json

from asked import CALL, COLOUR, LONG, MODEL, QUESTION, SHORT, TOOL, run, user
from ollama import Client


def _chat(url, text, tokens, **more):
    return Client(url).chat(MODEL, user(text), options={"temperature": 0, "num_predict": tokens}, **more)


def default(url):
    return _chat(url, QUESTION, SHORT).message.content


def stream(url):
    return [part.message.content for part in _chat(url, QUESTION, SHORT, stream=True)]


def tools(url):
    call = _chat(url, CALL, LONG, tools=[TOOL]).message.tool_calls[0].function
    return {"name": call.name, "arguments": dict(call.arguments)}


def structured(url):
    return json.loads(_chat(url, QUESTION, LONG, format=COLOUR).message.content)


run(default, stream, tools, structured)
