"""Every field of generation_config.json and its treatment: honoured, harmless, or refused with a reason.

The names are those of transformers' ``GenerationConfig``; tests/unit/model_files/test_generation_config.py compares them
with the installed version. Honoured means: as in transformers' ``generate`` with one prompt, one answer and one beam.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from speculation import limits

Parser = Callable[[Any], Any]


class Unfit(ValueError):
    """A field has a value that it cannot have; the message says what is allowed."""


# Fields without effect here, and why.
HARMLESS: dict[str, str] = {
    **dict.fromkeys(("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"), "concerns beams alone"),
    **dict.fromkeys(
        (
            "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config",
            "disable_compile", "continuous_batching_config", "low_memory",
        ),
        "how generate computes; the cache here is the verifier's own, in full precision",
    ),
    **dict.fromkeys(
        (
            "use_mtp", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
            "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
            "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
        ),
        "how generate drafts; here the strategy says so, and drafts change no token",
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        "what generate returns besides tokens",
    ),
    "pad_token_id": "nothing is padded",
    "bos_token_id": "generate begins with it where there is no prompt; here there always is one",
    "decoder_start_token_id": "concerns encoder-decoders alone",
    "_from_model_config": "says who wrote the file",
    "transformers_version": "says who wrote the file",
}  # fmt: skip

_ONE_ANSWER = "a request gets one answer, decoded without beams"
_ELSEWHERE = "transformers leaves this way of decoding to code from the hub"

# Fields that cannot be honoured: a test for the values that ask for nothing, and why all others are refused.
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (lambda value: value == 1, _ONE_ANSWER),
    "num_return_sequences": (lambda value: value == 1, _ONE_ANSWER),
    "constraints": (lambda value: False, _ONE_ANSWER),
    "force_words_ids": (lambda value: False, _ONE_ANSWER),
    "penalty_alpha": (lambda value: value == 0, _ELSEWHERE),
    "dola_layers": (lambda value: False, _ELSEWHERE),
    "guidance_scale": (lambda value: value == 1, "it needs a second pass without the prompt"),
    "watermarking_config": (lambda value: False, "answers are not watermarked"),
    "max_time": (lambda value: False, "the clock would change what is answered; a client can set a deadline"),
    "token_healing": (lambda value: value is False, "prompts are taken as they are"),
    "is_assistant": (lambda value: value is False, "the model is served as the target"),
    "force_bos_token_to_be_generated": (lambda value: value is False, "say forced_bos_token_id"),
    # Arguments of ``generate``, which refuses them in this file, too.
    **dict.fromkeys(
        (
            "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model",
            "streamer", "negative_prompt_ids", "negative_prompt_attention_mask",
        ),
        (lambda value: False, "it does not belong in a generation config"),
    ),
}  # fmt: skip


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unfit("must be true or false")
    return value


def _whole(low: int, high: int = limits.MAX_TOKENS) -> Parser:
    def parse(value: Any) -> int:
        if not _is_whole(value) or not low <= value <= high:
            raise Unfit(f"must be a whole number from {low} to {high}")
        return int(value)

    return parse


def _number(low: float, high: float, *, above_low: bool = False) -> Parser:
    def parse(value: Any) -> float:
        # NaN fails the comparison, and so does an integer that is too large.
        fits = (_is_whole(value) or isinstance(value, float)) and low <= value <= high and not (above_low and value == low)
        if not fits:
            span = f"above {low:g}, at most {high:g}" if above_low else f"from {low:g} to {high:g}"
            raise Unfit(f"must be a number {span}")
        return float(value)

    return parse


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_whole(token) and token >= 0 for token in value):
        raise Unfit("must be a list of token ids")
    return tuple(value)


def _id_or_ids(value: Any) -> tuple[int, ...]:
    try:
        return _ids([value] if _is_whole(value) else value)
    except Unfit:
        raise Unfit("must be a token id, or a list of token ids") from None


def _eos(value: Any) -> tuple[int, ...]:
    """Ids outside the vocabulary end nothing, as in ``generate``; so negative ones are allowed."""
    listed = [value] if _is_whole(value) else value
    if not isinstance(listed, list) or not all(map(_is_whole, listed)):
        raise Unfit("must be a token id, or a list of token ids")
    return tuple(listed)


def _sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    fits = isinstance(value, list) and value and all(isinstance(ids, list) and ids for ids in value)
    try:
        return tuple(map(_ids, value if fits else [None]))
    except Unfit:
        raise Unfit("must be a list of lists of token ids, none of them empty") from None


def _biases(value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    def fits(entry: Any) -> bool:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and entry[0]):
            return False
        number = _is_whole(entry[1]) or isinstance(entry[1], float)
        return number and (math.isfinite(entry[1]) or entry[1] == -math.inf)

    try:
        if not isinstance(value, list) or not value or not all(map(fits, value)):
            raise Unfit
        return tuple((_ids(ids), float(bias)) for ids, bias in value)
    except (Unfit, OverflowError):
        raise Unfit("must be a list of pairs: a list of token ids, and a number") from None


def _decay(value: Any) -> tuple[int, float]:
    try:
        start, factor = value
        return _whole(0)(start), _number(0, 1000, above_low=True)(factor)
    except (TypeError, ValueError):
        raise Unfit("must be a pair: tokens after which it begins, and a factor above 0, at most 1000") from None


def _strings(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    long = limits.MAX_STOP_CHARACTERS
    fits = isinstance(listed, list) and all(isinstance(text, str) and 1 <= len(text) <= long for text in listed)
    if not fits or len(listed) > limits.MAX_STOP_STRINGS:
        raise Unfit(f"must be at most {limits.MAX_STOP_STRINGS} texts of 1 to {long} characters")
    return tuple(listed)


# Fields that are honoured, and their parsers.
HONOURED: dict[str, Parser] = {
    "eos_token_id": _eos,
    # Defaults for fields of a request.
    "do_sample": _truth,
    "temperature": _number(0, limits.MAX_TEMPERATURE),
    "top_k": _whole(0),
    "top_p": _number(*limits.TOP_P, above_low=True),
    "min_p": _number(*limits.MIN_P),
    "repetition_penalty": _number(*limits.REPETITION_PENALTY),
    "max_new_tokens": _whole(1),
    "max_length": _whole(1),
    "min_new_tokens": _whole(0),
    "min_length": _whole(0),
    "stop_strings": _strings,
    # Processing of logits.
    "sequence_bias": _biases,
    "encoder_repetition_penalty": _number(0.01, 10),
    "no_repeat_ngram_size": _whole(0),
    "encoder_no_repeat_ngram_size": _whole(0),
    "bad_words_ids": _sequences,
    "forced_bos_token_id": _whole(0),
    "forced_eos_token_id": _id_or_ids,
    "remove_invalid_values": _truth,
    "exponential_decay_length_penalty": _decay,
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "top_h": _number(0, 1, above_low=True),
    "typical_p": _number(0, 1, above_low=True),
    "epsilon_cutoff": _number(0, 1),
    "eta_cutoff": _number(0, 1),
    "renormalize_logits": _truth,
}
