# /// script
# dependencies = ["langchain-openai==1.7.4"]
# ///
"""LangChain's ChatOpenAI, over chat completions."""

from asked import CALL, COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, TOOL, run
from langchain_openai import ChatOpenAI


def _model(url, tokens):
    return ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=tokens, max_retries=0)


def default(url):
    return _model(url, SHORT).invoke(QUESTION).content


def stream(url):
    return [chunk.content for chunk in _model(url, SHORT).stream(QUESTION)]


def tools(url):
    call = _model(url, LONG).bind_tools([TOOL]).invoke(CALL).tool_calls[0]
    return {"name": call["name"], "arguments": call["args"]}


def structured(url):
    return _model(url, LONG).with_structured_output({"title": "colour", **COLOUR}).invoke(QUESTION)


run(default, stream, tools, structured)
