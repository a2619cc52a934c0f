"""Where an answer's tokens come from -> outrider.v1, the public API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.v1 import generation_pb2 as pb
from services.api.origins import ComparedStrategy, DraftedNodes, ReportedPass, TokenOrigin


def encode_origins(origins: Sequence[TokenOrigin]) -> list[pb.TokenOrigin]:
    """The messages for a chunk's tokens."""
    return [pb.TokenOrigin(source=origin.source, text_length=origin.text_length) for origin in origins]


def encode_passes(passes: Sequence[ReportedPass]) -> list[pb.PassReport]:
    """The messages for the passes that a chunk's tokens come from."""
    return [
        pb.PassReport(
            **_fields(reported.checked),
            accepted=reported.accepted,
            committed=reported.committed,
            dropped=pb.DroppedNodes(**_fields(reported.dropped)),
            pass_s=reported.pass_s,
            wait_s=reported.wait_s,
            requests=reported.requests,
        )
        for reported in passes
    ]


def encode_comparisons(comparisons: Sequence[ComparedStrategy]) -> list[pb.Comparison]:
    """The messages for what other strategies would have made of an answer."""
    return [
        pb.Comparison(**{name: getattr(each, name) for name in ComparedStrategy.__dataclass_fields__})
        for each in comparisons
    ]


def _fields(nodes: DraftedNodes) -> dict[str, Any]:
    return {name: getattr(nodes, name) for name in DraftedNodes.__dataclass_fields__}
