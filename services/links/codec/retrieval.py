"""The messages between drafter and retrieval <-> retrieval.proto."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.internal.v1 import retrieval_pb2
from services.links.codec.features import decode_features, encode_features
from services.links.codec.trees import check_size
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.messages import Continuation, RetrievalQuery, Retrieved


def encode_queries(batch_id: int, queries: Sequence[RetrievalQuery]) -> retrieval_pb2.RetrieveRequest:
    """Drafter to retrieval."""
    return retrieval_pb2.RetrieveRequest(
        batch_id=batch_id,
        queries=[
            retrieval_pb2.Query(
                suffix=query.suffix,
                max_continuations=query.max_continuations,
                max_length=query.max_length,
                state=None if query.state is None else encode_features(query.state),
                session_id=query.session_id,
                traceparent=query.traceparent,
            )
            for query in queries
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
        RetrievalQuery(
            suffix=tuple(query.suffix),
            max_continuations=query.max_continuations,
            max_length=query.max_length,
            state=decode_features(query.state) if query.HasField("state") else None,
            session_id=query.session_id,
            traceparent=query.traceparent,
        )
        for query in wire.queries
    ]


def encode_answers(batch_id: int, answers: Sequence[Retrieved]) -> retrieval_pb2.RetrieveResponse:
    """Retrieval to drafter. All answers must come from one version of the index."""
    return retrieval_pb2.RetrieveResponse(
        batch_id=batch_id,
        answers=[
            retrieval_pb2.Answer(
                continuations=[
                    retrieval_pb2.Continuation(tokens=hit.tokens, count=hit.count, match_length=hit.match_length)
                    for hit in answer.continuations
                ]
            )
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
            continuations=tuple(
                Continuation(tokens=tuple(hit.tokens), count=hit.count, match_length=hit.match_length)
                for hit in answer.continuations
            ),
            index_version=wire.index_version,
        )
        for answer in wire.answers
    ]
