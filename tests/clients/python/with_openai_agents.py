# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
"""OpenAI's agents, over responses."""

import asyncio
from typing import Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, StopAtTools, function_tool
from asked import CALL, KEY, MODEL, QUESTION, WHOLE, run
from openai import AsyncOpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    colour: Literal["red", "green", "blue"]
    warm: bool


def _agent(url, choice=None, **more):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=WHOLE, tool_choice=choice)
    return Agent(name="helper", model=OpenAIResponsesModel(MODEL, client), model_settings=settings, **more)


def default(url):
    return Runner.run_sync(_agent(url), QUESTION).final_output


def stream(url):
    async def pieces():
        events = Runner.run_streamed(_agent(url), QUESTION).stream_events()
        raw = [event.data async for event in events if event.type == "raw_response_event"]
        return [event.delta for event in raw if event.type == "response.output_text.delta"]

    return asyncio.run(pieces())


def tools(url):
    called = []

    @function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        called.append({"name": "weather", "arguments": {"city": city}})
        return "sunny"

    agent = _agent(url, "required", tools=[weather], tool_use_behavior=StopAtTools(stop_at_tool_names=["weather"]))
    assert Runner.run_sync(agent, CALL).final_output == "sunny"
    return called[0]


def structured(url):
    return Runner.run_sync(_agent(url, output_type=Colour), QUESTION).final_output.model_dump()


run(default, stream, tools, structured)
