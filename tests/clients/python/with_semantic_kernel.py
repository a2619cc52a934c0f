# /// script
# dependencies = ["semantic-kernel==1.45.0"]
# ///
"""Semantic Kernel, over chat completions."""

import asyncio
import json
from typing import Literal

from asked import CALL, KEY, LONG, MODEL, QUESTION, SHORT, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.functions import kernel_function


class Colour(BaseModel):
    colour: Literal["red", "green", "blue"]
    warm: bool


@kernel_function(name="weather", description="The weather in a city.")
def weather(city: str) -> str:
    return "sunny"


def _asked(url, text, tokens, **more):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    history = ChatHistory()
    history.add_user_message(text)
    settings = OpenAIChatPromptExecutionSettings(temperature=0.0, max_tokens=tokens, **more)
    return OpenAIChatCompletion(MODEL, async_client=client), history, settings


def default(url):
    model, history, settings = _asked(url, QUESTION, SHORT)
    return asyncio.run(model.get_chat_message_content(history, settings)).content


def stream(url):
    async def pieces():
        model, history, settings = _asked(url, QUESTION, SHORT)
        return [each.content async for each in model.get_streaming_chat_message_content(history, settings)]

    return asyncio.run(pieces())


def tools(url):
    kernel = Kernel()
    kernel.add_function("sky", weather)
    choice = FunctionChoiceBehavior.Auto(auto_invoke=False)
    model, history, settings = _asked(url, CALL.replace("weather", "sky-weather"), LONG, function_choice_behavior=choice)
    told = asyncio.run(model.get_chat_message_content(history, settings, kernel=kernel))
    call = next(item for item in told.items if isinstance(item, FunctionCallContent))
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def structured(url):
    model, history, settings = _asked(url, QUESTION, LONG, response_format=Colour)
    return json.loads(asyncio.run(model.get_chat_message_content(history, settings)).content)


run(default, stream, tools, structured)
