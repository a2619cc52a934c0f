"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any

from services.api.http.openai import field_rules, other_servers
from services.api.http.openai.answer_form import read_form
from services.api.http.openai.errors import Refused
from services.api.http.openai.fields import Fields, token_ids
from services.api.http.openai.protocol.completion_body import DEFAULT_TOKENS, MAX_PROMPTS, CompletionBody
from services.api.http.openai.request import Asked, Input
from services.api.http.openai.shared_fields import (
    read_others,
    read_prompt_logprobs,
    read_sampling,
    read_seed,
    read_stream,
)
from services.api.messages import Infill, RequestedSampling


def read_completion(body: dict[str, Any]) -> Asked:
    """What a body asks for.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    fields = Fields(other_servers.in_own_names(body), CompletionBody)
    inputs = read_prompts(fields)
    sampling = read_sampling(fields)
    length = fields.whole("max_tokens")
    top, echo = fields.whole("logprobs"), fields.truth("echo") or False
    seed, stream, others = read_seed(fields), read_stream(fields), read_others(fields)
    of_prompt = read_prompt_logprobs(fields, stream)
    scored = max((each for each in (of_prompt, top if echo else None) if each is not None), default=None)
    form, form_field = read_form(fields)
    infill = _infill(fields, inputs, echo=echo, truncate=others["truncate"])
    _check_counts(fields, others["n"], len(inputs))
    without_effect = field_rules.take_unhonoured(fields, CompletionBody)
    left_out = other_servers.end(fields, field_rules.OF_COMPLETIONS, body)
    return Asked(
        inputs=inputs,
        # Where no answer is wanted, one token is the least work.
        sampling=RequestedSampling(
            **sampling,
            max_tokens=1 if length == 0 else length,
            logprobs=top,
            structured_outputs=form,
            prompt_logprobs=scored,
        ),
        answers=length != 0,
        prompt_logprobs=of_prompt,
        default_max_tokens=DEFAULT_TOKENS,
        top_logprobs=top,
        seed=seed,
        stream=stream,
        echo=echo,
        infill=infill,
        form_field=form_field,
        metadata=without_effect.get("metadata", {}),
        left_out=left_out,
        **others,
    )


def _infill(fields: Fields, inputs: tuple[Input, ...], *, echo: bool, truncate: int | None) -> Infill | None:
    suffix = fields.text("suffix")
    if not suffix:
        return None
    if not all(isinstance(each, str) for each in inputs):
        raise fields.refuse("suffix", suffix, "unset where the prompt is token ids")
    if echo:
        raise fields.refuse("echo", True, "false where suffix is set")
    if truncate is not None:
        raise fields.refuse("truncate_prompt_tokens", truncate, "unset where suffix is set")
    return Infill(suffix=suffix)


def _check_counts(fields: Fields, choices: int, prompts: int) -> None:
    best_of = fields.whole("best_of")
    if best_of is not None and best_of != choices:
        raise fields.refuse("best_of", best_of, f"unset, or n, {choices}: answers are not ranked", "unsupported_value")
    if prompts * choices > MAX_PROMPTS:
        raise fields.refuse("n", choices, f"at most {MAX_PROMPTS // prompts} for {prompts} prompts")


def read_prompts(fields: Fields) -> tuple[Input, ...]:
    """The prompts: a text, token ids, or a list of either.

    Raises:
        Refused: there is none, or it is neither.
    """
    given = fields.take("prompt")
    if given is None:
        raise fields.refuse("prompt", "unset", "a text, token ids, or a list of either", "missing_required_parameter")
    if isinstance(given, str):
        return (_filled(given, "prompt"),)
    if not isinstance(given, list):
        raise fields.refuse("prompt", given, "a text, token ids, or a list of either", "invalid_type")
    if not given:
        raise fields.refuse("prompt", "empty", "at least one text or token id")
    if isinstance(given[0], int):
        return (token_ids("prompt", given),)
    if len(given) > MAX_PROMPTS:
        raise fields.refuse("prompt", f"{len(given)} prompts", f"at most {MAX_PROMPTS} prompts")
    return tuple(_one(entry, f"prompt[{index}]", type(given[0])) for index, entry in enumerate(given))


def _one(entry: Any, name: str, kind: type) -> Input:
    if not isinstance(entry, kind) or not isinstance(entry, str | list):
        raise Refused(name, entry, "a text or a list of token ids, as the first one", "invalid_type")
    return _filled(entry if isinstance(entry, str) else token_ids(name, entry), name)


def _filled(value: str | tuple[int, ...], name: str) -> str | tuple[int, ...]:
    if not value:
        raise Refused(name, "empty", "at least one character or token id")
    return value
