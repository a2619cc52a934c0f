# /// script
# dependencies = ["dspy==3.4.1"]
# [tool.outrider]
# stream = "Not tried: it streams fields of programs."
# ///
"""DSPy's programs, over chat completions (by LiteLLM)."""

import json
from typing import Literal

import dspy
from asked import CALL, KEY, LONG, MODEL, QUESTION, SHORT, TOOL, run
from pydantic import BaseModel


class Colour(BaseModel):
    colour: Literal["red", "green", "blue"]
    warm: bool


def _model(url, tokens):
    where = {"api_base": f"{url}/v1", "api_key": KEY, "num_retries": 0, "cache": False}
    return dspy.LM(f"openai/{MODEL}", temperature=0, max_tokens=tokens, **where)


def default(url):
    return _model(url, SHORT)(QUESTION)[0]


def tools(url):
    answer = _model(url, LONG)(CALL, tools=[TOOL])[0]
    function = answer["tool_calls"][0].function
    return {"name": function.name, "arguments": json.loads(function.arguments)}


def structured(url):
    answer = _model(url, LONG)(QUESTION, response_format=Colour)[0]
    return json.loads(answer)


run(default, tools, structured)
