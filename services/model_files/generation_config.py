"""Reads a model's generation_config.json: defaults for its requests, and the processing of its logits.

It is read without transformers, so that a check before the start takes no time. As in transformers: without this file,
config.json may hold the same fields; null means unset; an end-of-text id outside the vocabulary ends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from services.model_files.folder import read_json
from services.model_files.generation_fields import HARMLESS, HONOURED, REFUSED, Unfit
from speculation import limits
from speculation.errors import ConfigurationError
from speculation.types import SamplingDefaults

FILE = "generation_config.json"
# ``generate``'s top_k where a file asks for sampling and does not set it.
_TOP_K = 50
# Fields of ``SamplingDefaults`` that have another name in the file.
_CALLED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProcessors:
    """Processing of logits that requests cannot ask for; names and meanings are transformers'.

    ``top_h``, ``typical_p``, ``epsilon_cutoff`` and ``eta_cutoff`` apply to sampled tokens only.
    """

    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    renormalize_logits: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def shown(self) -> tuple[tuple[str, str], ...]:
        """Name and JSON value (at most a thousand characters) of each processor that is on."""
        return tuple(
            (entry.name, _shortened(json.dumps(getattr(self, entry.name)), 1000))
            for entry in fields(self)
            if entry.name != "eos_token_ids" and getattr(self, entry.name) != entry.default
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """The content of a generation config.

    Attributes:
        eos_token_ids: the model's end-of-text tokens that are in its vocabulary.
        defaults: values for fields that a request leaves out.
        processors: processing of logits.
        notes: sentences for the log about fields without effect.
    """

    eos_token_ids: frozenset[int] = frozenset()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    processors: ModelProcessors = field(default_factory=ModelProcessors)
    notes: tuple[str, ...] = field(default=(), compare=False)


def read_generation_config(
    model: Path, choice: str = "auto", override: Mapping[str, Any] | None = None, *, vocab_size: int | None = None
) -> GenerationConfig:
    """Read a model's generation config.

    Args:
        model: the model's folder.
        choice: "auto": the model's own file; "none": only the end-of-text tokens of the model's own file; otherwise another
            generation_config.json, or a folder that has one. If that names no end-of-text tokens, the model's own apply.
        override: fields that replace those of the file; None unsets a field.
        vocab_size: token ids must be below it; None: not checked.

    Raises:
        ConfigurationError: the file cannot be read, or asks for what cannot be honoured; one line that names the field.
    """
    source, content = _of_model(model) if choice in ("auto", "none") else _of_another(choice)
    if choice != "auto" and (choice == "none" or content.get("eos_token_id") is None):
        own = _of_model(model)[1].get("eos_token_id")
        content = {**(content if choice != "none" else {}), "eos_token_id": own}
    changes = override or {}
    if unknown := sorted(set(changes) - {*HONOURED, *REFUSED, *HARMLESS}):
        known = ", ".join(sorted(HONOURED))
        raise ConfigurationError(
            f"verifier.override_generation_config names {unknown[0]}, which is unknown; known: {known}",
            about="verifier.override_generation_config",
        )
    asked = {name: value for name, value in {**content, **changes}.items() if value is not None}
    for name, (asks_for_nothing, why) in REFUSED.items():
        if name in asked and not asks_for_nothing(asked[name]):
            raise _refused(source, name, asked[name], why)
    found = {name: _parse(source, name, asked[name]) for name in HONOURED if name in asked}
    return _join(source, asked, found, vocab_size)


def _of_model(model: Path) -> tuple[str, dict[str, Any]]:
    """Path of the file with the fields, and the fields."""
    file = model / FILE
    if file.is_file():
        return str(file), read_json(file)
    return str(model / "config.json"), _of_model_config(model / "config.json")


def _of_another(choice: str) -> tuple[str, dict[str, Any]]:
    file = Path(choice).expanduser()
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise ConfigurationError(
            field="verifier.generation_config", value=choice, allowed=f"auto, none, or a folder that has a {FILE}"
        )
    return str(file), read_json(file)


def _of_model_config(file: Path) -> dict[str, Any]:
    """Older models hold the fields in config.json. If the language model is one of several parts, its part applies, too."""
    if not file.is_file():
        return {}
    content = read_json(file)
    part: Any = next((content[name] for name in ("decoder", "generator", "text_config") if content.get(name)), {})
    known = {*HONOURED, *REFUSED}
    found = {name: value for name, value in content.items() if name in known and value is not None}
    return {**{name: part[name] for name in known if isinstance(part, dict) and name in part}, **found}


def _refused(source: str, name: str, value: object, why: object) -> ConfigurationError:
    shown = _shortened(json.dumps(value, default=str), 80)
    return ConfigurationError(f"{why}; {_way_out(name)}", place=source, field=name, value=shown)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _way_out(name: str) -> str:
    return (
        f"leave it out with verifier.override_generation_config={{{name}: null}}, or all such fields with "
        "verifier.generation_config=none"
    )


def _parse(source: str, name: str, value: object) -> Any:
    try:
        return HONOURED[name](value)
    except Unfit as error:
        raise _refused(source, name, value, error) from error


def _join(source: str, asked: Mapping[str, Any], found: dict[str, Any], vocab_size: int | None) -> GenerationConfig:
    notes = []
    unknown = sorted(set(asked) - {*HONOURED, *REFUSED, *HARMLESS})
    if unknown:
        notes.append(f"{source}: {', '.join(unknown)}: unknown, so without effect, as in transformers")
    eos = tuple(dict.fromkeys(found.get("eos_token_id", ())))
    inside = tuple(token for token in eos if token >= 0 and (vocab_size is None or token < vocab_size))
    if inside != eos:
        beyond = ", ".join(str(token) for token in eos if token not in inside)
        notes.append(f"{source}: eos_token_id {beyond}: no token of the model, so no answer ends there")
    values = {entry.name: found[entry.name] for entry in fields(ModelProcessors) if entry.name in found}
    processors = ModelProcessors(**values, eos_token_ids=inside)
    _check(source, asked, processors, vocab_size)
    return GenerationConfig(
        eos_token_ids=frozenset(inside), defaults=_defaults(source, found), processors=processors, notes=tuple(notes)
    )


def _defaults(source: str, found: Mapping[str, Any]) -> SamplingDefaults:
    names = {entry.name: _CALLED.get(entry.name, entry.name) for entry in fields(SamplingDefaults)}
    values = {name: found[called] for name, called in names.items() if called in found}
    values.pop("temperature", None)
    # Only do_sample decides whether a model's requests are sampled.
    if found.get("do_sample"):
        values = {"top_k": _TOP_K, **values, "temperature": found.get("temperature", 1.0)}
        if values["temperature"] < limits.MIN_TEMPERATURE:
            why = f"with do_sample it must be from {limits.MIN_TEMPERATURE} to {limits.MAX_TEMPERATURE:g}"
            raise _refused(source, "temperature", values["temperature"], why)
    return SamplingDefaults(**values)


def _check(source: str, asked: Mapping[str, Any], processors: ModelProcessors, vocab_size: int | None) -> None:
    """Check fields against each other and against the vocabulary."""
    forced = {
        "forced_bos_token_id": () if processors.forced_bos_token_id is None else (processors.forced_bos_token_id,),
        "forced_eos_token_id": processors.forced_eos_token_id,
    }
    named = {
        **forced,
        "bad_words_ids": tuple(token for ids in processors.bad_words_ids for token in ids),
        "sequence_bias": tuple(token for ids, _ in processors.sequence_bias for token in ids),
    }
    for name, ids in named.items():
        if vocab_size is not None and any(token >= vocab_size for token in ids):
            raise _refused(source, name, asked[name], f"token ids must be below {vocab_size}")
    for name, ids in forced.items():
        if ids and set(ids) <= set(processors.suppress_tokens):
            raise _refused(source, name, asked[name], "suppress_tokens suppresses what it forces")
    name = "exponential_decay_length_penalty"
    if processors.exponential_decay_length_penalty is not None and not processors.eos_token_ids:
        raise _refused(source, name, asked[name], "there is no eos_token_id")
