"""The fields that chat and text completions share: sampling, streaming, speculation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from services.api.grpc.messages import privacy_of
from services.api.http.openai.errors import Refused
from services.api.http.openai.fields import WITHOUT_EFFECT, Fields
from services.api.http.openai.protocol.parts import Prediction, Speculation, StreamOptions
from services.api.http.openai.protocol.shared_body import MOST_OF_ID
from services.api.messages import MAX_SALT_CHARACTERS
from speculation import limits
from speculation.types import AcceptanceRule, Effort, Report

_LEAST_TOP_P = 1e-9


def read_sampling(fields: Fields) -> dict[str, Any]:
    """Sampling parameters that are set, by their names in ``RequestedSampling``; but for length, seed and log-probabilities.

    Raises:
        Refused: a value is outside its range.
    """
    given = {
        "temperature": _temperature(fields),
        "top_p": _top_p(fields),
        "top_k": _top_k(fields),
        "min_p": fields.number("min_p"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "min_tokens": fields.whole("min_tokens"),
        "ignore_eos": fields.truth("ignore_eos"),
        "ignore_generation_config": fields.truth("ignore_generation_config"),
        "stop_token_ids": fields.ids("stop_token_ids"),
        "stop": _stop(fields),
        "logit_bias": _logit_bias(fields),
        "allowed_token_ids": _allowed(fields),
        "bad_words": _bad_words(fields),
    }
    return {name: value for name, value in given.items() if value is not None}


def _temperature(fields: Fields) -> float | None:
    """Below the least temperature that logits are divided by, an answer is as good as the likeliest one: it is that."""
    value = fields.number("temperature")
    return 0.0 if value is not None and value < limits.MIN_TEMPERATURE else value


def _top_p(fields: Fields) -> float | None:
    """0 keeps the likeliest token alone, as every share that it exceeds does."""
    value = fields.number("top_p")
    return _LEAST_TOP_P if value == 0 else value


def _top_k(fields: Fields) -> int | None:
    value = fields.whole("top_k")
    return 0 if value == -1 else value


def _stop(fields: Fields) -> tuple[str, ...] | None:
    value = fields.take("stop")
    if value is None:
        return None
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise fields.refuse("stop", value, "a text, or a list of texts", "invalid_type")
    if any(not text for text in listed):
        raise fields.refuse("stop", "an empty text", f"texts of 1 to {limits.MAX_STOP_CHARACTERS} characters")
    return tuple(listed)


def _allowed(fields: Fields) -> tuple[int, ...] | None:
    ids = fields.ids("allowed_token_ids")
    if ids == ():
        raise fields.refuse("allowed_token_ids", "empty", "at least one token id, or unset")
    # Each once: every choice is sent them all.
    return None if ids is None else tuple(dict.fromkeys(ids))


def _bad_words(fields: Fields) -> tuple[str, ...] | None:
    words = fields.listed("bad_words")
    if words is not None and not all(isinstance(word, str) for word in words):
        raise fields.refuse("bad_words", words, "a list of texts", "invalid_type")
    return None if words is None else tuple(words)


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    given = fields.mapping("logit_bias")
    if given is None:
        return None
    found: dict[int, float] = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise fields.refuse("logit_bias", key or "an empty key", "an object whose keys are token ids, such as 50256")
        low, high = limits.LOGIT_BIAS
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not low <= bias <= high:
            raise Refused(f"logit_bias.{key}", bias, f"a number from {low:g} to {high:g}")
        if int(key) in found:
            raise fields.refuse("logit_bias", key, "token ids, each once", "duplicate_parameter")
        found[int(key)] = float(bias)
    return found


def read_seed(fields: Fields) -> int | None:
    """The seed; a negative one stands for the unsigned number with the same 64 bits."""
    seed = fields.whole("seed")
    return None if seed is None else seed % 2**64


def read_stream(fields: Fields) -> StreamOptions | None:
    """How the answer is streamed; None: it is not.

    Raises:
        Refused: there are unknown options.
    """
    stream, options = fields.truth("stream") or False, fields.below("stream_options", StreamOptions)
    if options is None:
        return StreamOptions() if stream else None
    given = {}
    for name in StreamOptions.model_fields:
        if options.given(name):
            value = options.truth(name)
            if value is None:
                raise options.refuse(name, None, "true or false", "invalid_type")
            given[name] = value
    options.end()
    # Of an answer that comes whole they say nothing.
    return StreamOptions(**given) if stream else None


def read_speculation(fields: Fields) -> dict[str, Any]:
    """What is set of how the answer is drafted and what it tells of that, by the names in ``ClientRequest``."""
    below = fields.below("speculation", Speculation)
    if below is None:
        return {}
    given = {
        "strategy": below.text("strategy"),
        "sources": _names(below, "sources", "a list of sources' names"),
        "num_speculative_tokens": below.whole("num_speculative_tokens"),
        "acceptance": cast(AcceptanceRule | None, below.one_of("acceptance")),
        "effort": cast(Effort | None, below.one_of("effort")),
        "drafter": below.text("drafter"),
        "group": below.text("group"),
        "report": cast(Report | None, below.one_of("report")),
        "compare": _names(below, "compare", "a list of strategies' names"),
    }
    below.end()
    return {name: value for name, value in given.items() if value is not None}


def _names(fields: Fields, field: str, allowed: str) -> tuple[str, ...] | None:
    names = fields.listed(field)
    if names is not None and not all(isinstance(name, str) for name in names):
        raise fields.refuse(field, names, allowed, "invalid_type")
    return None if names is None else tuple(names)


def read_prompt_logprobs(fields: Fields, stream: StreamOptions | None) -> int | None:
    """How many log-probabilities of each of the prompt's tokens to return besides its own; None: none at all.

    Raises:
        Refused: some are wanted of an answer that is streamed.
    """
    top = fields.whole("prompt_logprobs")
    if top is not None and stream is not None:
        raise fields.refuse("prompt_logprobs", top, "unset where stream is true: an answer that comes whole has them")
    return top


def read_prediction(fields: Fields) -> str:
    """The text that the answer is expected to be; empty: none."""
    below = fields.below("prediction", Prediction)
    if below is None:
        return ""
    if below.text("type") != "content":
        raise below.refuse("type", "another", "content")
    content = below.take("content")
    below.end()
    return text_of(content, below.name("content"), joined_by="")


def parts_of(content: Any, path: str, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of a content that is no text, each with its name in errors.

    Args:
        kind: a type of part, as an example.

    Raises:
        Refused: it is no list of objects; names the part.
    """
    if not isinstance(content, list):
        raise Refused(path, content, f"a text, or a list of parts of type {kind}", "invalid_type")
    for index, part in enumerate(content):
        name = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise Refused(name, part, f'a part such as {{"type": "{kind}", "text": "..."}}', "invalid_type")
        yield name, part


def text_of(content: Any, path: str, *, joined_by: str = "\n") -> str:
    """The text of a content: a text, or parts of type text.

    Raises:
        Refused: it is neither, or has parts of other types; names the part.
    """
    if isinstance(content, str):
        return content
    texts = []
    for name, part in parts_of(content, path, "text"):
        if part.get("type") != "text":
            raise Refused(name, str(part.get("type")), "of type text: the model reads text alone", "unsupported_value")
        if not isinstance(part.get("text"), str):
            raise Refused(f"{name}.text", part.get("text"), "a text", "invalid_type")
        if unknown := set(part) - {"type", "text", "annotations", *WITHOUT_EFFECT}:
            raise Refused(f"{name}.{min(unknown)}", "set", "unset: there is no such field", "unknown_parameter")
        texts.append(part["text"])
    return joined_by.join(texts)


def read_others(fields: Fields) -> dict[str, Any]:
    """The remaining shared fields, by their names in ``Asked``."""
    truncate = fields.whole("truncate_prompt_tokens")
    if truncate == 0:
        raise fields.refuse("truncate_prompt_tokens", 0, "-1, or a whole number from 1")
    skip = fields.truth("skip_special_tokens")
    salt = fields.text("cache_salt")
    if salt == "":
        raise fields.refuse("cache_salt", "empty", f"a text of 1 to {MAX_SALT_CHARACTERS} characters, or unset")
    request_id = fields.text("request_id")
    if request_id is not None and not (request_id and request_id.isascii() and request_id.isprintable()):
        raise fields.refuse("request_id", request_id or "empty", f"1 to {MOST_OF_ID} printable ASCII characters")
    return {
        "n": _or(fields.whole("n"), 1),
        "model": fields.text("model"),
        "prediction": read_prediction(fields),
        "skip_special_tokens": _or(skip, True),
        "stream_interval": fields.whole("stream_interval"),
        "truncate": truncate,
        "truncates_end": fields.one_of("truncation_side") == "right",
        "private": privacy_of(fields.one_of("privacy") or ""),
        "cache_salt": salt or "",
        "priority": _or(fields.whole("priority"), 0),
        "include_stop": fields.truth("include_stop_str_in_output") or False,
        "return_token_ids": fields.truth("return_token_ids") or False,
        "tokens_as_ids": fields.truth("return_tokens_as_token_ids") or False,
        "request_id": request_id,
        **read_speculation(fields),
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
