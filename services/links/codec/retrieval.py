"""The messages between drafter and retrieval <-> retrieval.proto."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.internal.v1 import retrieval_pb2
from services.links.codec.checks import check_size
from services.links.codec.features import decode_features, encode_features
from services.links.codec.same_fields import SameFields
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.messages import Continuation, RetrievalQuery, Retrieved

_QUERY = SameFields(RetrievalQuery, retrieval_pb2.Query, by_hand=("state",))
_CONTINUATION = SameFields(Continuation, retrieval_pb2.Continuation)


def encode_queries(batch_id: int, queries: Sequence[RetrievalQuery]) -> retrieval_pb2.RetrieveRequest:
    """Drafter to retrieval."""
    return retrieval_pb2.RetrieveRequest(
        batch_id=batch_id,
        queries=[
            _QUERY.encode(query, state=None if query.state is None else encode_features(query.state)) for query in queries
        ],
    )


def decode_queries(wire: retrieval_pb2.RetrieveRequest) -> list[RetrievalQuery]:
    """Decode a message from drafter to retrieval.

    Raises:
        InvalidArgument: a limit is broken; names the field.
    """
    check_size("queries", len(wire.queries), limits.MAX_QUERIES)
    for query in wire.queries:
        check_size("query.suffix", len(query.suffix), limits.MAX_SUFFIX)
        check_size("query.max_continuations", query.max_continuations, limits.MAX_CONTINUATIONS)
        check_size("query.max_length", query.max_length, limits.MAX_CONTINUATION)
    return [
        _QUERY.decode(query, state=decode_features(query.state) if query.HasField("state") else None)
        for query in wire.queries
    ]


def encode_answers(batch_id: int, answers: Sequence[Retrieved]) -> retrieval_pb2.RetrieveResponse:
    """Retrieval to drafter. All answers must come from one version of the index."""
    return retrieval_pb2.RetrieveResponse(
        batch_id=batch_id,
        answers=[
            retrieval_pb2.Answer(continuations=[_CONTINUATION.encode(hit) for hit in answer.continuations])
            for answer in answers
        ],
        index_version=answers[0].index_version if answers else "",
    )


def decode_answers(wire: retrieval_pb2.RetrieveResponse, expected: int) -> list[Retrieved]:
    """Decode a message from retrieval to drafter.

    Raises:
        InvalidArgument: there are not ``expected`` answers, or a limit is broken.
    """
    if len(wire.answers) != expected:
        raise InvalidArgument("answers", f"{len(wire.answers)}", f"{expected}, one for each query")
    for answer in wire.answers:
        check_size("answer.continuations", len(answer.continuations), limits.MAX_CONTINUATIONS)
        for hit in answer.continuations:
            check_size("continuation.tokens", len(hit.tokens), limits.MAX_CONTINUATION)
    return [
        Retrieved(
            continuations=tuple(_CONTINUATION.decode(hit) for hit in answer.continuations),
            index_version=wire.index_version,
        )
        for answer in wire.answers
    ]
