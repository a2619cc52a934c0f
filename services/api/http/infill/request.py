"""Reads the body of /infill by the rules of text completions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from services.api.http.declared import read_declared
from services.api.http.infill.protocol import HINTS, LEFT_OUT, InfillBody
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.errors import Refused
from services.api.http.openai.request import Asked
from services.api.messages import Infill
from speculation.errors import InvalidArgument

_SHARED = (
    "stream", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos", "model",
    "speculation", "privacy", "cache_salt",
)  # fmt: skip
_NAMES = {
    "prompt": "input_prefix",
    "suffix": "input_suffix",
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
}


def read_infill(body: dict[str, Any]) -> tuple[Asked, tuple[str, ...] | None]:
    """What a body asks for, and which fields of the answer; None: all.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    given = read_declared(InfillBody, body, hints=HINTS)
    length = None if given.n_predict in (None, -1) else max(1, given.n_predict or 0)
    completion: dict[str, Any] = {name: getattr(given, name) for name in _SHARED}
    completion |= {"max_tokens": length, "stop": given.stop or None, "repetition_penalty": given.repeat_penalty}
    completion |= {"seed": None if given.seed == -1 else given.seed, "return_token_ids": given.return_tokens}
    # The prompt is told apart below: before a gap there may be nothing.
    with infill_names():
        asked = read_completion({"prompt": "-", **{name: value for name, value in completion.items() if value is not None}})
    files = tuple((each.filename, each.text) for each in given.input_extra or ())
    fields = None if given.response_fields is None else tuple(given.response_fields)
    asked = replace(
        asked,
        inputs=(given.input_prefix + (given.prompt or ""),),
        infill=Infill(suffix=given.input_suffix, files=files),
        answers=given.n_predict != 0,
        default_max_tokens=None,
        length_field="n_predict",
        left_out=tuple(
            Refused(name, "set" if isinstance(value, list) else value, allowed, "unsupported_parameter")
            for name, allowed in LEFT_OUT.items()
            if (value := getattr(given, name)) not in (None, [], "", 0, -1)
        ),
    )
    # Empty, it is as if it were unset, as at llama-server.
    return asked, fields or None


@contextmanager
def infill_names() -> Iterator[None]:
    """Errors within name the fields as /infill does."""
    try:
        yield
    except InvalidArgument as error:
        name = _NAMES.get(error.field, error.field)
        if isinstance(error, Refused):
            raise Refused(name, error.value, error.allowed, error.code) from error
        raise type(error)(name, error.value, error.allowed) from error
