# /// script
# dependencies = ["llama-index-llms-openai-like==0.8.1"]
# ///
"""LlamaIndex's OpenAILike, over chat completions."""

from typing import Literal

from asked import CALL, KEY, LONG, MODEL, QUESTION, SHORT, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Colour(BaseModel):
    colour: Literal["red", "green", "blue"]
    warm: bool


def _model(url, tokens):
    of_chat = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
    wanted = {"model": MODEL, "temperature": 0, "max_tokens": tokens, "max_retries": 0}
    return OpenAILike(api_base=f"{url}/v1", api_key=KEY, **of_chat, **wanted)


def default(url):
    return _model(url, SHORT).chat([ChatMessage(content=QUESTION)]).message.content


def stream(url):
    return [chunk.delta for chunk in _model(url, SHORT).stream_chat([ChatMessage(content=QUESTION)])]


def weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


def tools(url):
    model = _model(url, LONG)
    answer = model.chat_with_tools([FunctionTool.from_defaults(weather)], CALL)
    call = model.get_tool_calls_from_response(answer)[0]
    return {"name": call.tool_name, "arguments": call.tool_kwargs}


def structured(url):
    answer = _model(url, LONG).as_structured_llm(Colour).chat([ChatMessage(content=QUESTION)])
    return answer.raw.model_dump()


run(default, stream, tools, structured)
