"""Keeps a stream to a component open: connects, and reconnects when the stream ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from services.links.channel import client_options

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_RETRY_FIRST_S, _RETRY_MOST_S = 0.1, 2.0


async def stay_connected(
    name: str, resolve: Callable[[], Awaitable[str]], max_bytes: int, talk: Callable[[grpc.aio.Channel], Awaitable[None]]
) -> None:
    """Connect to the component ``name`` and run ``talk`` on the channel, again and again until cancelled.

    Args:
        resolve: gives its "host:port" before every attempt, so that a restarted component is found.
        max_bytes: largest message.
    """
    delay = _RETRY_FIRST_S
    while True:
        try:
            address = await resolve()
            async with grpc.aio.insecure_channel(address, options=client_options(max_bytes)) as channel:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await channel.channel_ready()
                delay = _RETRY_FIRST_S
                log.info("connected to the %s at %s", name, address)
                await talk(channel)
        except asyncio.CancelledError:
            # Cancelling only the stream raises this too. Stop only if this task was cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            log.warning("no %s: the stream was given up; trying again", name)
        except Exception as error:
            log.warning("no %s: %s; trying again", name, _reason(error))
        await asyncio.sleep(delay)
        delay = min(2 * delay, _RETRY_MOST_S)


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
