"""Asks a service over HTTP for each line of a batch, some at once."""

from __future__ import annotations

import http.client
import json
import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from email.message import Message
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from cli.batch_files import NAMED, BatchRequest
from outrider._addresses import is_loopback
from speculation.errors import ConfigurationError, OutriderError, Unavailable

# Of a service that is busy, that starts or stops, or of what stands before one.
_TRY_AGAIN = frozenset({429, 502, 503})
# Seconds for which a request is tried, and between two tries.
_PATIENCE_S = 600.0
_WAITS_S = (0.5, 30.0)
# Seconds without a byte of an answer; services end requests earlier by themselves.
_SILENCE_S = 3600.0
_LEFT_OUT = "x-outrider-ignored"
# Headers are Latin-1.
_MOST_OF_LETTER = 0xFF


@dataclass(frozen=True, kw_only=True, slots=True)
class _Through:
    line: dict[str, Any]
    answered: bool = False
    left_out: tuple[str, ...] = ()


@dataclass(slots=True)
class BatchTally:
    """What became of the lines so far.

    Attributes:
        left_out: how many answers left out something that was asked for, by its name.
    """

    answered: int = 0
    refused: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def count(self, ended: _Through) -> None:
        """One more is through."""
        self.answered += ended.answered
        self.refused += not ended.answered
        self.left_out.update(ended.left_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heard:
    status: int
    headers: Message
    content: bytes


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key goes to nobody but whom it is meant for."""

    @override
    def redirect_request(self, *arguments: Any, **keywords: Any) -> None:
        return None


class BatchRun:
    """The lines of answers, in the order in which they come.

    Args:
        url: the service's, as http://127.0.0.1:8000; a /v1 at its end is as well.
        roots: certificates in place of the system's, for https.
        at_once: most requests under way.
        patience_s: how long a request is tried where the service is busy or away.

    Raises:
        ConfigurationError: ``url``, the key or the certificates are none.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        roots: str | None = None,
        at_once: int = 16,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        host = _host_of(self._url)
        if host is None:
            raise ConfigurationError(field="--url", value=url, allowed="as http://HOST:PORT or https://HOST")
        # No proxy leads to this machine, whatever the environment says.
        direct = [urllib.request.ProxyHandler({})] if is_loopback(host) else []
        context = _trusting(roots)
        self._opener = urllib.request.build_opener(*direct, _NoRedirects(), urllib.request.HTTPSHandler(context=context))
        self._headers = {"content-type": "application/json", "user-agent": "outrider-run-batch"}
        if api_key is not None:
            if not _fits_header(api_key):
                raise ConfigurationError("must be one line of letters that a header can hold", field="--api-key")
            self._headers["authorization"] = f"Bearer {api_key}"
        self._at_once, self._patience_s = at_once, patience_s
        self.tally = BatchTally()

    def lines(self, requests: Sequence[BatchRequest]) -> Iterator[dict[str, Any]]:
        """Ask for all of them.

        Raises:
            Unavailable: the service cannot be reached, or no longer.
        """
        self._check_reached()
        waiting: queue.SimpleQueue[BatchRequest] = queue.SimpleQueue()
        for request in requests:
            waiting.put(request)
        through: queue.SimpleQueue[_Through | Exception] = queue.SimpleQueue()
        for _ in range(min(self._at_once, len(requests))):
            # They hold up nobody who has had enough.
            threading.Thread(target=self._work, args=(waiting, through), daemon=True).start()
        for _ in requests:
            ended = through.get()
            if isinstance(ended, Exception):
                raise ended
            self.tally.count(ended)
            yield ended.line

    def _work(self, waiting: queue.SimpleQueue[BatchRequest], through: queue.SimpleQueue[_Through | Exception]) -> None:
        while True:
            try:
                request = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                through.put(self._through(request))
            except Exception as error:
                through.put(error)
                return

    def _through(self, request: BatchRequest) -> _Through:
        heard = self._heard(request)
        line: dict[str, Any] = {"id": f"{NAMED}{uuid.uuid4().hex}", "custom_id": request.custom_id}
        try:
            body = json.loads(heard.content)
        except ValueError:
            said = f"{request.path} answered with {heard.status} and no JSON"
            return _Through(line={**line, "response": None, "error": {"code": "invalid_response", "message": said}})
        response = {"status_code": heard.status, "request_id": heard.headers.get("x-request-id", ""), "body": body}
        return _Through(
            line={**line, "response": response, "error": None},
            answered=heard.status == http.client.OK,
            left_out=tuple(name.strip() for name in heard.headers.get(_LEFT_OUT, "").split(",") if name.strip()),
        )

    def _heard(self, request: BatchRequest) -> _Heard:
        """The answer; while the service is busy or away, it is asked again."""
        url, data = self._url + request.path, json.dumps(dict(request.body)).encode()
        until, wait = time.monotonic() + self._patience_s, _WAITS_S[0]
        while True:
            asked = urllib.request.Request(url, data, self._headers, method="POST")
            heard, why = None, ""
            try:
                heard = self._once(asked)
            except (OSError, http.client.HTTPException) as error:
                why = self._reason(error)
            if heard is not None and heard.status not in _TRY_AGAIN:
                return heard
            pause = max(wait, _asked_pause(heard))
            if time.monotonic() + pause > until:
                if heard is not None:
                    return heard
                raise self._away(why)
            time.sleep(pause)
            wait = min(2 * wait, _WAITS_S[1])

    def _check_reached(self) -> None:
        """Whoever names a wrong address is told at once."""
        try:
            self._once(urllib.request.Request(f"{self._url}/health"))
        except (OSError, http.client.HTTPException) as error:
            raise self._away(self._reason(error)) from error

    def _away(self, why: str) -> Unavailable:
        return Unavailable(f"no service answers at {self._url} ({why}); start one with: outrider serve, or use --in-process")

    def _reason(self, error: Exception) -> str:
        """Why there was no answer.

        Raises:
            OutriderError: no other try would have one.
        """
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise OutriderError(f"{self._url}: {reason.verify_message}; --tls-root names its certificates") from error
        return str(reason) or type(reason).__name__

    def _once(self, asked: urllib.request.Request) -> _Heard:
        try:
            with self._opener.open(asked, timeout=_SILENCE_S) as answer:
                return _Heard(status=answer.status, headers=answer.headers, content=answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return _Heard(status=error.code, headers=error.headers, content=error.read())


def _host_of(url: str) -> str | None:
    """Whom a URL names; None: it is no URL that can be asked."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return None
    return parts.hostname if known and url.isascii() and url.isprintable() and " " not in url else None


def _trusting(roots: str | None) -> ssl.SSLContext:
    """What makes connections. ``roots``: as of ``BatchRun``."""
    try:
        if roots == "":
            raise ValueError("an empty text would be the system's certificates")
        return ssl.create_default_context(cadata=roots)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise ConfigurationError("holds no certificates in PEM", field="--tls-root") from error


def _fits_header(text: str) -> bool:
    return text.isprintable() and all(ord(letter) <= _MOST_OF_LETTER for letter in text)


def _asked_pause(heard: _Heard | None) -> float:
    """The seconds that a service asks for before the next try."""
    try:
        return max(0.0, float(heard.headers.get("retry-after", 0))) if heard is not None else 0.0
    except ValueError:
        return 0.0
