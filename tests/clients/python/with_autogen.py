# /// script
# dependencies = ["autogen-ext[openai]==0.7.5", "autogen-agentchat==0.7.5"]
# ///
"""AutoGen's assistants, over chat completions."""

import asyncio
import json
from typing import Literal

from asked import CALL, KEY, LONG, MODEL, QUESTION, SHORT, run
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, ToolCallRequestEvent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class Colour(BaseModel):
    colour: Literal["red", "green", "blue"]
    warm: bool


def weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


def _assistant(url, tokens, **more):
    info = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}
    wanted = {"model": MODEL, "model_info": info, "temperature": 0, "max_tokens": tokens, "max_retries": 0}
    client = OpenAIChatCompletionClient(base_url=f"{url}/v1", api_key=KEY, **wanted)
    return AssistantAgent("helper", model_client=client, **more)


def default(url):
    return asyncio.run(_assistant(url, SHORT).run(task=QUESTION)).messages[-1].content


def stream(url):
    async def pieces():
        told = _assistant(url, SHORT, model_client_stream=True).run_stream(task=QUESTION)
        return [event.content async for event in told if isinstance(event, ModelClientStreamingChunkEvent)]

    return asyncio.run(pieces())


def tools(url):
    told = asyncio.run(_assistant(url, LONG, tools=[weather], system_message=None).run(task=CALL)).messages
    call = next(each for each in told if isinstance(each, ToolCallRequestEvent)).content[0]
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def structured(url):
    told = asyncio.run(_assistant(url, LONG, output_content_type=Colour).run(task=QUESTION)).messages
    return told[-1].content.model_dump()


run(default, stream, tools, structured)
