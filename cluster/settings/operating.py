"""Settings for operators: metrics, traces, logs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.settings.placement import Section
from services.metrics.families import OtherServer
from services.patterns import URL


class MetricsSettings(Section):
    """Where the components' numbers go: to exactly one place, so that nothing is counted twice."""

    export: Literal["prometheus", "ray", "none"] | None = Field(
        None,
        description="where numbers go; prometheus: /metrics of the ops port has all of them (in one process); ray: Ray's "
        "own agent on each node exports them with the prefix ray_ (on Ray); none: nothing is counted; null: what suits the "
        "place",
    )
    names_of: tuple[OtherServer, ...] = Field(
        (),
        description="servers by whose names /metrics has the numbers, too, that they have as well "
        "(vllm:num_requests_running, sglang:num_running_reqs, trtllm_num_requests_running, llamacpp:requests_processing, "
        "...), for their dashboards and `vllm bench serve`; on Ray, that of the API port alone (server.metrics)",
    )


class TracingSettings(Section):
    """Traces of requests, by OpenTelemetry's conventions for generative AI. They hold no text and no tokens."""

    otlp_endpoint: str | None = Field(
        None,
        pattern=URL,
        description="URL of a collector that speaks OTLP over gRPC, such as http://127.0.0.1:4317, which needs "
        "`pip install outrider-server[tracing]`; null: no traces",
    )
    sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share of the requests that are traced; where the caller brings a trace, it decides"
    )


class LoggingSettings(Section):
    """What the components write to stderr. Never prompts, answers or API keys."""

    format: Literal["text", "json"] = Field(
        "text",
        description="form of a line; json: one object, with time, level, logger, message, and where known request_id and "
        "trace",
    )
    level: Literal["debug", "info", "warning", "error"] | None = Field(
        None, description="least severe lines to write; null: info with -v, else error"
    )
