"""Kept answers <-> answers.proto."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.internal.v1 import answers_pb2
from services.links.codec.checks import check_size
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.messages import RecalledAnswers

_MOST_ID = (1 << 31) - 1


def encode_recalled(recalled: RecalledAnswers) -> answers_pb2.RecallResponse:
    """Retrieval to drafter."""
    return answers_pb2.RecallResponse(
        generation=recalled.generation,
        answers=[answers_pb2.KeptAnswer(tokens=tokens) for tokens in recalled.answers],
        last=recalled.last,
        more=recalled.more,
    )


def decode_recalled(wire: answers_pb2.RecallResponse) -> RecalledAnswers:
    """Decode a message from retrieval to drafter.

    Raises:
        InvalidArgument: a limit is broken; names the field.
    """
    return RecalledAnswers(
        generation=wire.generation,
        answers=tuple(tuple(checked_answer(answer.tokens)) for answer in wire.answers),
        last=wire.last,
        more=wire.more,
    )


def checked_answer(tokens: Sequence[int]) -> Sequence[int]:
    """The tokens of an answer.

    Raises:
        InvalidArgument: there are too many, or one is no token id.
    """
    check_size("answer.tokens", len(tokens), limits.MAX_KEPT_ANSWER)
    if (most := max(tokens, default=0)) > _MOST_ID:
        raise InvalidArgument("answer.tokens", str(most), f"token ids up to {_MOST_ID}")
    return tokens
