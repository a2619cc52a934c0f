"""The room of a context: a prompt and its answer together have at most ``max_model_len`` tokens.

Of 512, a prompt of 100 tokens leaves 412. A request for 500 is refused, and one for 50 gets 50. A request without a number
takes that of the model's generation config: max_new_tokens of 600 is cut to 412; max_length of 300 counts the prompt, so 200
are left. If the config has neither, the request gets 256. A prompt of 512 tokens is refused.
"""

from __future__ import annotations

from speculation.errors import InvalidArgument, PromptTooLong
from speculation.types import DEFAULT_MAX_TOKENS, SamplingDefaults

_NO_DEFAULTS = SamplingDefaults()


def room_behind(prompt_length: int, max_model_len: int, field: str = "prompt") -> int:
    """The tokens that a prompt leaves to its answer, at least one.

    Args:
        field: of the request, which holds the prompt.

    Raises:
        PromptTooLong: it leaves none.
    """
    if prompt_length >= max_model_len:
        allowed = f"at most {max_model_len - 1} tokens (this model's maximum context length is {max_model_len} tokens)"
        raise PromptTooLong(field, f"{prompt_length} tokens", allowed)
    return max_model_len - prompt_length


def check_fits(field: str, tokens: int | None, room: int, max_model_len: int) -> None:
    """Refuse an answer's length that the room does not have; None: the request does not say.

    Raises:
        InvalidArgument: the room has fewer tokens.
    """
    if tokens is not None and tokens > room:
        context = f"this model's maximum context length is {max_model_len} tokens"
        raise InvalidArgument(field, tokens, f"at most {room}, what the prompt leaves: {context}")


def longest_answer(
    asked: int | None,
    *,
    defaults: SamplingDefaults = _NO_DEFAULTS,
    prompt_length: int = 0,
    room: int | None = None,
    most: int | None = None,
    otherwise: int | None = DEFAULT_MAX_TOKENS,
) -> int:
    """Most tokens of an answer.

    Args:
        asked: what the request says; None: nothing.
        room: as of ``room_behind``; None: not known yet.
        most: what the caller may have; None: any length.
        otherwise: where neither the request nor the model says; None: all of the room.

    Raises:
        InvalidArgument: the request does not say, and the prompt is as long as the model's ``max_length``.
    """
    wanted = asked if asked is not None else defaults.max_tokens
    if wanted is None and defaults.max_length is not None:
        if defaults.max_length <= prompt_length:
            raise InvalidArgument(
                "max_tokens",
                "unset",
                f"set: the prompt has {prompt_length} tokens, and the model's generation config lets prompt and answer "
                f"together have {defaults.max_length} (max_length) where a request does not say",
            )
        wanted = defaults.max_length - prompt_length
    return min(each for each in (otherwise if wanted is None else wanted, room, most) if each is not None)
