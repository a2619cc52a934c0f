"""Our errors as gRPC statuses. The errors' fields travel in the trailer ``outrider-error-bin``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from outrider.v1 import generation_pb2
from services.links.request_names import REQUEST_ID, traceparent_of
from services.logs.names import UsersName
from services.logs.printable import printable
from services.statuses import status_of
from speculation import errors
from speculation.errors import (
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
)

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

DETAIL_KEY = "outrider-error-bin"
# Characters of an error: clients drop the whole answer where trailers are larger than 8 KiB.
_MOST_SHOWN = 600
_STATUS_KEY = "grpc-status-details-bin"


def detail_of(error: OutriderError) -> generation_pb2.ErrorDetail:
    """The fields of ``error`` that a client program may need."""
    if isinstance(error, InvalidArgument):
        return generation_pb2.ErrorDetail(
            field=error.field, value=error.value, allowed=printable(error.allowed, _MOST_SHOWN)
        )
    if isinstance(error, ResourceExhausted):
        return generation_pb2.ErrorDetail(retry_after_s=error.retry_after_s)
    return generation_pb2.ErrorDetail()


def _with_retry_info(error: ResourceExhausted) -> bytes:
    """The error as google.rpc.Status with a RetryInfo, for clients that are not ours."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
    told = status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message=str(error))
    told.details.add().Pack(info)
    return bytes(told.SerializeToString())


async def abort(context: Context, error: OutriderError) -> NoReturn:
    """End a call with ``error``'s status, and with the trailing metadata that have been set."""
    trailer = (*(context.trailing_metadata() or ()), (DETAIL_KEY, detail_of(error).SerializeToString()))
    if isinstance(error, ResourceExhausted):
        trailer = (*trailer, (_STATUS_KEY, _with_retry_info(error)))
    await context.abort(grpc.StatusCode[status_of(error).grpc], printable(str(error), _MOST_SHOWN), trailer)
    raise AssertionError("context.abort returned")


@asynccontextmanager
async def aborting(context: Context) -> AsyncIterator[None]:
    """End the call with the matching status if the block raises. Details of unexpected errors go to our log only."""
    try:
        yield
    except OutriderError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("call %s failed", _named(context))
        await abort(context, errors.Internal("internal error; the server's log says why"))


def _named(context: Context) -> str:
    """The request's id, where one has been given to the call's answer."""
    ids = [value for name, value in context.trailing_metadata() or () if name == REQUEST_ID and isinstance(value, str)]
    return UsersName(ids[0], traceparent_of(context.invocation_metadata())) if ids else "without a name"
