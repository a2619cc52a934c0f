"""What differs between the APIs in every answer: how an error is written, and what the request's id is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.api.http.openai.errors import error_body
from services.links.request_names import REQUEST_ID
from speculation.errors import OutriderError


@dataclass(frozen=True, slots=True)
class Door:
    """One API.

    Attributes:
        error: the JSON of an answer that is an error, given the request's id.
        id_headers: the headers that hold the id.
    """

    error: Callable[[OutriderError, str], dict[str, Any]]
    id_headers: tuple[str, ...]


OPENAI = Door(lambda error, _: error_body(error), (REQUEST_ID,))
