# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""OpenAI's client, over responses."""

import json

from asked import CALL, COLOUR, FUNCTION, KEY, LONG, MODEL, QUESTION, SHORT, run
from openai import OpenAI


def _create(url, asked, tokens, **more):
    client = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return client.responses.create(model=MODEL, input=asked, temperature=0, max_output_tokens=tokens, **more)


def default(url):
    return _create(url, QUESTION, SHORT).output_text


def stream(url):
    events = _create(url, QUESTION, SHORT, stream=True)
    return [event.delta for event in events if event.type == "response.output_text.delta"]


def tools(url):
    answer = _create(url, CALL, LONG, tools=[{"type": "function", "strict": True, **FUNCTION}])
    call = next(item for item in answer.output if item.type == "function_call")
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def structured(url):
    form = {"type": "json_schema", "name": "colour", "schema": COLOUR, "strict": True}
    return json.loads(_create(url, QUESTION, LONG, text={"format": form}).output_text)


run(default, stream, tools, structured)
