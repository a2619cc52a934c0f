# /// script
# dependencies = ["anthropic==2.14.0"]
# ///
"""Anthropic's client, over messages."""

import json

from anthropic import Anthropic
from asked import CALL, CITY, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, run, user


def _asked(url, text, tokens, **more):
    client = Anthropic(base_url=url, api_key=KEY, max_retries=0)
    body = {"model": MODEL, "messages": user(text), "max_tokens": tokens, **more}
    # The client no longer declares a temperature.
    return client.messages, {**body, "extra_body": {"temperature": 0}}


def default(url):
    messages, body = _asked(url, QUESTION, SHORT)
    return messages.create(**body).content[0].text


def stream(url):
    messages, body = _asked(url, QUESTION, SHORT)
    with messages.stream(**body) as events:
        return list(events.text_stream)


def tools(url):
    messages, body = _asked(url, CALL, LONG, tools=[{"name": "weather", "input_schema": CITY}])
    call = next(block for block in messages.create(**body).content if block.type == "tool_use")
    return {"name": call.name, "arguments": call.input}


def structured(url):
    form = {"format": {"type": "json_schema", "schema": COLOUR}}
    messages, body = _asked(url, QUESTION, LONG, output_config=form)
    return json.loads(messages.create(**body).content[0].text)


run(default, stream, tools, structured)
