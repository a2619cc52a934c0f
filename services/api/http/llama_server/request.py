"""Reads the bodies of /completion and /infill by the rules of text completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from services.api.http.declared import read_declared
from services.api.http.llama_server.protocol import HINTS, LEFT_OUT, ContinueBody, InfillBody, LlamaBody
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.errors import Refused, renamed, shown
from services.api.http.openai.other_servers import asks_for_nothing, counts_left_out
from services.api.http.openai.request import Asked
from services.api.messages import Infill
from speculation.errors import InvalidArgument

_SHARED = (
    "stream", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos", "model",
    "speculation", "privacy", "cache_salt",
)  # fmt: skip
_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "structured_outputs.json": "json_schema",
}
_NAMES_OF_GAPS = {**_NAMES, "prompt": "input_prefix", "suffix": "input_suffix"}
# Names in response_fields, and characters of one.
_MOST_FIELDS, _MOST_OF_FIELD = 64, 128
# What of the fields that only /v1/completions has asks for nothing.
_NOTHING_ELSEWHERE: dict[str, Callable[[Any], bool]] = {
    "logit_bias": lambda value: value is False or value in ([], {}),
    "n": lambda value: type(value) is int and value == 1,
}
# Which fields of the answer are told; None: all.
Chosen = tuple[str, ...] | None
_BodyT = TypeVar("_BodyT", bound=LlamaBody)


def read_continue(body: dict[str, Any]) -> tuple[Asked, Chosen]:
    """What a body of /completion asks for.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    prompt = body.get("prompt")
    if not isinstance(prompt, str | None) and not (isinstance(prompt, list) and all(type(each) is int for each in prompt)):
        raise Refused("prompt", prompt, "a text, or token ids; several are asked for one by one", "invalid_type")
    given, counts = _read(ContinueBody, body)
    with continue_names():
        form = {} if given.json_schema is None else {"structured_outputs": {"json": given.json_schema}}
        asked = replace(_asked(given, counts, prompt=given.prompt, **form), form_field="json_schema" if form else "")
    return asked, _chosen(given)


def read_infill(body: dict[str, Any]) -> tuple[Asked, Chosen]:
    """What a body of /infill asks for.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    given, counts = _read(InfillBody, body)
    # The prompt is told apart below: before a gap there may be nothing.
    with infill_names():
        asked = _asked(given, counts, prompt="-")
    files = tuple((each.filename, each.text) for each in given.input_extra or ())
    inputs = (given.input_prefix + (given.prompt or ""),)
    return replace(asked, inputs=inputs, infill=Infill(suffix=given.input_suffix, files=files)), _chosen(given)


def _read(kind: type[_BodyT], body: Mapping[str, Any]) -> tuple[_BodyT, Mapping[str, Any]]:
    """The body without what asks for nothing, as clients send it that send everything, and what of it is left out."""
    ours = {**body, "repetition_penalty": body.get("repeat_penalty")}
    counts = counts_left_out(ours)
    kept = {
        name: value
        for name, value in body.items()
        if value is not None
        and name not in counts
        and (name in kind.model_fields or not _asks_for_nothing(name, value, ours))
    }
    return read_declared(kind, kept, hints=HINTS), counts


def _asks_for_nothing(name: str, value: Any, body: Mapping[str, Any]) -> bool:
    if name in _NOTHING_ELSEWHERE:
        return _NOTHING_ELSEWHERE[name](value)
    return name in HINTS and asks_for_nothing(name, value, body)


def _asked(given: LlamaBody, counts: Mapping[str, Any], **more: Any) -> Asked:
    left_out = {name: value for name in LEFT_OUT if (value := getattr(given, name)) not in (None, [], "", 0, -1)}
    left_out |= counts
    length = None if given.n_predict in (None, -1) else max(1, given.n_predict or 0)
    completion: dict[str, Any] = {**{name: getattr(given, name) for name in _SHARED}, **more}
    completion |= {"max_tokens": length, "stop": given.stop or None, "repetition_penalty": given.repeat_penalty}
    completion |= {"seed": None if given.seed == -1 else given.seed, "return_token_ids": given.return_tokens}
    return replace(
        read_completion({name: value for name, value in completion.items() if value is not None}),
        answers=given.n_predict != 0,
        default_max_tokens=None,
        length_field="n_predict",
        left_out=tuple(
            Refused(name, shown(value), LEFT_OUT.get(name) or HINTS[name], "unsupported_parameter")
            for name, value in left_out.items()
        ),
    )


def _chosen(given: LlamaBody) -> Chosen:
    # Empty, it is as if it were unset, as at llama-server.
    if not given.response_fields:
        return None
    if len(given.response_fields) > _MOST_FIELDS or any(len(name) > _MOST_OF_FIELD for name in given.response_fields):
        raise Refused("response_fields", "set", f"at most {_MOST_FIELDS} names of at most {_MOST_OF_FIELD} characters")
    return tuple(given.response_fields)


@contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except InvalidArgument as error:
        raise renamed(error, names.get(error.field, error.field)) from error


def continue_names() -> AbstractContextManager[None]:
    """Errors within name the fields as /completion does."""
    return _named(_NAMES)


def infill_names() -> AbstractContextManager[None]:
    """Errors within name the fields as /infill does."""
    return _named(_NAMES_OF_GAPS)
