# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""smolagents' OpenAIModel, over chat completions."""

import json

from asked import CALL, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, run, user
from smolagents import OpenAIModel, tool


def _model(url, tokens):
    return OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=tokens)


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name.
    """
    return "sunny"


def default(url):
    return _model(url, SHORT).generate(user(QUESTION)).content


def stream(url):
    return [delta.content or "" for delta in _model(url, SHORT).generate_stream(user(QUESTION))]


def tools(url):
    call = _model(url, LONG).generate(user(CALL), tools_to_call_from=[weather]).tool_calls[0].function
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def structured(url):
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    return json.loads(_model(url, LONG).generate(user(QUESTION), response_format=form).content)


run(default, stream, tools, structured)
