# /// script
# dependencies = ["guidance==0.3.1", "openai==3.57.0"]
# [tool.outrider]
# stream = "Not tried: it streams all, and shows whole states."
# tools = "Not tried: it asks until the model calls none, which one so small never does."
# ///
"""guidance, over chat completions."""

import json

import guidance
from asked import COLOUR, KEY, LONG, MODEL, QUESTION, SHORT, run
from guidance import assistant, gen
from guidance import user as from_user

# Zero is left out by the client.
TINY = 1e-9


def _said(url, what):
    model = guidance.models.OpenAI(MODEL, api_key=KEY, base_url=f"{url}/v1", max_retries=0, echo=False)
    with from_user():
        model += QUESTION
    with assistant():
        model += what
    return model["said"]


def default(url):
    return _said(url, gen("said", temperature=TINY, max_tokens=SHORT))


def structured(url):
    return json.loads(_said(url, guidance.json("said", schema=COLOUR, temperature=TINY, max_tokens=LONG)))


run(default, structured)
