# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""pydantic-ai's agents, over chat completions."""

import asyncio
from contextlib import suppress
from typing import Literal

from asked import CALL, KEY, LONG, MODEL, QUESTION, SHORT, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


class Colour(BaseModel):
    colour: Literal["red", "green", "blue"]
    warm: bool


def _agent(url, tokens, **more):
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    return Agent(model, model_settings={"temperature": 0, "max_tokens": tokens}, **more)


def default(url):
    return _agent(url, SHORT).run_sync(QUESTION).output


def stream(url):
    async def pieces():
        async with _agent(url, SHORT).run_stream(QUESTION) as answer:
            return [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]

    return asyncio.run(pieces())


def tools(url):
    called = []

    def weather(city: str) -> str:
        """The weather in a city."""
        called.append({"name": "weather", "arguments": {"city": city}})
        return "sunny"

    with suppress(UsageLimitExceeded):
        _agent(url, LONG, tools=[weather]).run_sync(CALL, usage_limits=UsageLimits(request_limit=2))
    return called[0]


def structured(url):
    return _agent(url, LONG, output_type=NativeOutput(Colour)).run_sync(QUESTION).output.model_dump()


run(default, stream, tools, structured)
