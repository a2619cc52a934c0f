# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""OpenAI's client, over chat completions."""

import json

from asked import CALL, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, TOOL, run, user
from openai import OpenAI


def _client(url):
    return OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0).chat.completions


def default(url):
    answer = _client(url).create(model=MODEL, messages=user(QUESTION), temperature=0, max_tokens=SHORT)
    return answer.choices[0].message.content


def stream(url):
    chunks = _client(url).create(model=MODEL, messages=user(QUESTION), temperature=0, max_tokens=SHORT, stream=True)
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


def tools(url):
    answer = _client(url).create(model=MODEL, messages=user(CALL), tools=[TOOL], temperature=0, max_tokens=LONG)
    function = answer.choices[0].message.tool_calls[0].function
    return {"name": function.name, "arguments": json.loads(function.arguments)}


def structured(url):
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    answer = _client(url).create(model=MODEL, messages=user(QUESTION), response_format=form, temperature=0, max_tokens=LONG)
    return json.loads(answer.choices[0].message.content)


run(default, stream, tools, structured)
