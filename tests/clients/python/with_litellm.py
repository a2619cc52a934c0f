# /// script
# dependencies = ["litellm==1.108.7"]
# ///
"""LiteLLM's library, over chat completions."""

import json

import litellm
from asked import CALL, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, TOOL, run, user


def _complete(url, text, tokens, **more):
    where = {"api_base": f"{url}/v1", "api_key": KEY, "num_retries": 0}
    wanted = {"model": f"openai/{MODEL}", "messages": user(text), "temperature": 0, "max_tokens": tokens}
    return litellm.completion(**where, **wanted, **more)


def default(url):
    return _complete(url, QUESTION, SHORT).choices[0].message.content


def stream(url):
    return [chunk.choices[0].delta.content or "" for chunk in _complete(url, QUESTION, SHORT, stream=True)]


def tools(url):
    function = _complete(url, CALL, LONG, tools=[TOOL]).choices[0].message.tool_calls[0].function
    return {"name": function.name, "arguments": json.loads(function.arguments)}


def structured(url):
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    return json.loads(_complete(url, QUESTION, LONG, response_format=form).choices[0].message.content)


run(default, stream, tools, structured)
