"""Keeps a stream to a component open: connects, and reconnects when the stream ends."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from services.links.channel import Options, client_options
from services.links.tls.mutual import CallerTls

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_RETRY_FIRST_S, _RETRY_MOST_S = 0.1, 2.0


def _channel(address: str, options: Options, tls: CallerTls | None) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=options) if tls is None else tls.channel(address, options)


async def stay_connected(
    name: str,
    resolve: Callable[[], Awaitable[str]],
    max_bytes: int,
    talk: Callable[[grpc.aio.Channel], Awaitable[None]],
    tls: CallerTls | None = None,
    *,
    channel_to: Callable[[str, Options, CallerTls | None], grpc.aio.Channel] = _channel,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Connect to the component ``name`` and run ``talk`` on the channel, again and again until cancelled.

    Args:
        resolve: gives its "host:port" before every attempt, so that a restarted component is found.
        max_bytes: largest message.
        tls: gives the channels' credentials; None: plain text.
        channel_to: makes a channel.
        pause: waits for so many seconds between attempts.
    """
    delay, clock, connected_at = _RETRY_FIRST_S, asyncio.get_running_loop().time, math.inf
    while True:
        try:
            address = await resolve()
            async with channel_to(address, client_options(max_bytes), tls) as channel:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await channel.channel_ready()
                connected_at = clock()
                log.info("connected to the %s at %s", name, address)
                if await _renewed_while(talk(channel), tls):
                    log.info("the certificate was renewed: connecting to the %s anew", name)
                    continue
        except asyncio.CancelledError:
            # Cancelling only the stream raises this too. Stop only if this task was cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            log.warning("no %s: the stream was given up; trying again", name)
        except Exception as error:
            log.warning("no %s: %s; trying again", name, _reason(error))
        # A peer that is of another version may end every stream at once.
        if clock() - connected_at > _RETRY_MOST_S:
            delay = _RETRY_FIRST_S
        connected_at = math.inf
        await pause(delay)
        delay = min(2 * delay, _RETRY_MOST_S)


async def _renewed_while(talking: Awaitable[None], tls: CallerTls | None) -> bool:
    """Talk until the talk ends, or the caller's certificate is renewed; returns whether that was why."""
    if tls is None:
        await talking
        return False
    talk, renewed = asyncio.ensure_future(talking), asyncio.ensure_future(tls.renewed())
    try:
        await asyncio.wait((talk, renewed), return_when=asyncio.FIRST_COMPLETED)
        if talk.done():
            await talk
        return not talk.done()
    finally:
        for task in (talk, renewed):
            task.cancel()
        await asyncio.gather(talk, renewed, return_exceptions=True)


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
