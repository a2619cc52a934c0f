# /// script
# dependencies = ["outlines[openai]==1.3.3"]
# [tool.outrider]
# tools = "It has none for models behind a server."
# ///
"""outlines' OpenAI and vLLM models, over chat completions."""

import json

import outlines
from asked import COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, run
from openai import OpenAI


def _model(url, kind=outlines.from_openai):
    return kind(OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), MODEL)


def default(url):
    return _model(url)(QUESTION, temperature=0, max_tokens=SHORT)


def stream(url):
    return list(_model(url).stream(QUESTION, temperature=0, max_tokens=SHORT))


def structured(url):
    schema = outlines.json_schema(json.dumps(COLOUR))
    word = _model(url, outlines.from_vllm)(QUESTION, outlines.regex("(red|green|blue)"), temperature=0, max_tokens=LONG)
    assert word in ("red", "green", "blue"), word
    for_vllm = _model(url, outlines.from_vllm)(QUESTION, schema, temperature=0, max_tokens=LONG)
    answer = _model(url)(QUESTION, schema, temperature=0, max_tokens=LONG)
    assert for_vllm == answer, (for_vllm, answer)
    return json.loads(answer)


run(default, stream, structured)
