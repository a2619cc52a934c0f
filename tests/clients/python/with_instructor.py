# /// script
# dependencies = ["instructor==1.17.0"]
# [tool.outrider]
# default = "Its answers are objects alone."
# stream = "It streams objects that grow; the last column is by one, too."
# tools = "It has a schema called as a function; the last column is by such a call, and by a JSON schema."
# ///
"""instructor, over chat completions."""

from typing import Literal

import instructor
from asked import KEY, LONG, MODEL, QUESTION, run, user
from openai import OpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    colour: Literal["red", "green", "blue"]
    warm: bool


def structured(url):
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), mode=instructor.Mode.TOOLS)
    wanted = {"model": MODEL, "messages": user(QUESTION), "temperature": 0, "max_tokens": LONG, "max_retries": 0}
    by_call = client.chat.completions.create(response_model=Colour, **wanted)
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
    client.chat.completions.create(response_model=Colour, **wanted)
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=instructor.Mode.TOOLS)
    partial = list(client.chat.completions.create_partial(response_model=Colour, **wanted))
    assert partial[-1].model_dump() == by_call.model_dump(), partial
    return by_call.model_dump()


run(structured)
