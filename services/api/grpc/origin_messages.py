"""Where an answer's tokens come from -> outrider.v1, the public API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.v1 import generation_pb2 as pb
from services.api.origins import DraftedNodes, ReportedPass, TokenOrigin


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


def _fields(nodes: DraftedNodes) -> dict[str, Any]:
    return {name: getattr(nodes, name) for name in DraftedNodes.__dataclass_fields__}
