"""Settings of the public servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cluster.settings.marked import marked
from cluster.settings.placement import Section
from services.api.config import HttpConfig, PublicServerConfig

if TYPE_CHECKING:

    class _OfServer(Section, PublicServerConfig): ...
else:
    _OfServer = marked(HttpConfig, Section)


class ServerSettings(_OfServer):
    """The public servers, gRPC and HTTP."""

    http_port: int | None = Field(
        HttpConfig().port,
        ge=0,
        le=65535,
        description="port of OpenAI's HTTP API on the same interface; 0: any free one, as it is by default where "
        "server.port is 0; null: no HTTP",
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file of the public servers' certificate chain, read again when it changes; null: no TLS"
    )
    tls_key: Path | None = Field(None, description="PEM file of the private key of tls_certificate, without password")
    served_model_name: tuple[str, ...] = Field(
        (),
        description="names by which users call the model, the first one in answers; none: the name of its folder or file, "
        "or that of the hub",
    )
    reasoning: Literal["auto", "none"] = Field(
        default="auto",
        description="what a model thinks before it answers: auto tells it apart as reasoning_content, where the chat "
        "template or the tokenizer has marks for it; none leaves it in the answer's text",
    )
    tools: Literal["any", "template"] = Field(
        "any",
        description="which requests with tools are taken: any, where a chat template without a place for tools gets them in "
        "a general form; or those alone that the template has a place for",
    )
    ops_host: str = Field(
        "127.0.0.1",
        description="interface of the port for those who operate the service; it asks for no key and speaks no TLS, so only "
        "they should reach it",
    )
    ops_port: int | None = Field(
        9464,
        ge=0,
        le=65535,
        description="port of /metrics, /health and /ready over HTTP; 0: any free one, as it is by default where server.port "
        "is 0; null: none",
    )

    @property
    def http(self) -> int | None:
        """The port of HTTP; 0: any free one, also where gRPC's is left to the machine; None: there is none."""
        unset = "http_port" not in self.model_fields_set
        return 0 if unset and self.port == 0 else self.http_port

    @property
    def ops(self) -> int | None:
        """The port of the ops listener; 0: any free one; None: there is none."""
        unset = "ops_port" not in self.model_fields_set
        return 0 if unset and self.port == 0 else self.ops_port
