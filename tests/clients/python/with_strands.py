# /// script
# dependencies = ["strands-agents[openai]==1.62.0"]
# ///
"""Strands' agents, over chat completions."""

import asyncio
from contextlib import suppress
from typing import Literal

from asked import CALL, KEY, LONG, MODEL, QUESTION, WHOLE, run
from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel


class Colour(BaseModel):
    """A colour."""

    colour: Literal["red", "green", "blue"]
    warm: bool


def _agent(url, tokens, **more):
    where = {"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0}
    model = OpenAIModel(client_args=where, model_id=MODEL, params={"temperature": 0, "max_tokens": tokens})
    return Agent(model=model, callback_handler=None, **more)


def _pieces(agent, text):
    async def pieces():
        return [event["data"] async for event in agent.stream_async(text) if "data" in event]

    return asyncio.run(pieces())


def default(url):
    return "".join(_pieces(_agent(url, WHOLE), QUESTION))


def stream(url):
    return _pieces(_agent(url, WHOLE), QUESTION)


def tools(url):
    called = []

    @tool
    def weather(city: str) -> str:
        """The weather in a city."""
        called.append({"name": "weather", "arguments": {"city": city}})
        raise KeyboardInterrupt

    # It would go on until the model calls no more.
    with suppress(KeyboardInterrupt):
        _agent(url, LONG, tools=[weather])(CALL)
    return called[0]


def structured(url):
    return _agent(url, LONG).structured_output(Colour, QUESTION).model_dump()


run(default, stream, tools, structured)
