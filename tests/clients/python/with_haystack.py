# /// script
# dependencies = ["haystack-ai==3.4.1"]
# ///
"""Haystack's generators, over chat completions."""

import json
from typing import Literal

from asked import CALL, KEY, LONG, MODEL, QUESTION, SHORT, run
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel


class Colour(BaseModel):
    colour: Literal["red", "green", "blue"]
    warm: bool


def _reply(url, text, tokens, more=None, **settings):
    wanted = {"temperature": 0, "max_completion_tokens": tokens, **(more or {})}
    where = {"api_base_url": f"{url}/v1", "api_key": Secret.from_token(KEY), "max_retries": 0}
    model = OpenAIChatGenerator(model=MODEL, generation_kwargs=wanted, **where, **settings)
    return model.run([ChatMessage.from_user(text)])["replies"][0]


def default(url):
    return _reply(url, QUESTION, SHORT).text


def stream(url):
    pieces = []
    _reply(url, QUESTION, SHORT, streaming_callback=lambda chunk: pieces.append(chunk.content))
    return pieces


def weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


def tools(url):
    call = _reply(url, CALL, LONG, tools=[create_tool_from_function(weather)]).tool_calls[0]
    return {"name": call.tool_name, "arguments": call.arguments}


def structured(url):
    return json.loads(_reply(url, QUESTION, LONG, {"response_format": Colour}).text)


run(default, stream, tools, structured)
