"""The live state of a service as JSON: ``GET /v1/outrider/status``.

Sums over all requests would show much of a single one while few are under way, such as how many of another tenant's drafts
were right (arXiv 2411.01076), so they need the scope ``observe``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from services.api.http.openai.usage import server_version
from services.api.messages import RouterPort
from speculation import limits
from speculation.errors import OutriderError
from speculation.messages import DecodingCounts, ServiceState, VerifierCard

log = logging.getLogger(__name__)


async def state_in_time(router: RouterPort) -> ServiceState:
    """The state that a router tells; an empty one where none comes in time."""
    try:
        async with asyncio.timeout(limits.DESCRIBE_S):
            return await router.service_state()
    except (TimeoutError, OutriderError) as error:
        log.info("the state of the service is not known: %s", error)
        return ServiceState()


def status_of(state: ServiceState, *, whole: bool) -> dict[str, Any]:
    """What a caller may see of a state.

    Args:
        whole: with the sums over all requests, and each verifier.
    """
    cards = state.verifiers
    told: dict[str, Any] = {
        "object": "outrider.status",
        "version": server_version(),
        "ready": bool(cards),
        "requests": {"running": sum(card.running for card in cards), "waiting": sum(card.waiting for card in cards)},
        "components": {name: dict(states) for name, states in state.components.items()},
    }
    if whole:
        counts = _sum([card.counts for card in cards])
        told |= {"cache": _cache(cards, counts), "decoding": _decoding(counts), "sources": _sources(counts)}
        told["verifiers"] = [_verifier(card) for card in cards]
    return told


def _sum(counts: list[DecodingCounts]) -> DecodingCounts:
    drafted, accepted = Counter[str](), Counter[str]()
    for each in counts:
        drafted.update(each.drafted_by_source)
        accepted.update(each.accepted_by_source)
    return DecodingCounts(
        tokens=sum(each.tokens for each in counts),
        passes=sum(each.passes for each in counts),
        prompt_tokens=sum(each.prompt_tokens for each in counts),
        cached_prompt_tokens=sum(each.cached_prompt_tokens for each in counts),
        drafted_by_source=drafted,
        accepted_by_source=accepted,
        saved_s=sum(each.saved_s for each in counts),
    )


def _used(cards: tuple[VerifierCard, ...]) -> float:
    """Share of the key-value cache that requests hold."""
    total = sum(card.total_blocks for card in cards)
    return round(1 - sum(card.free_blocks for card in cards) / total, 4) if total else 0.0


def _cache(cards: tuple[VerifierCard, ...], counts: DecodingCounts) -> dict[str, Any]:
    return {
        "used": _used(cards),
        "prompt_tokens": counts.prompt_tokens,
        "cached_prompt_tokens": counts.cached_prompt_tokens,
    }


def _decoding(counts: DecodingCounts) -> dict[str, Any]:
    return {
        "tokens": counts.tokens,
        "passes": counts.passes,
        "tokens_per_pass": round(counts.tokens / counts.passes, 4) if counts.passes else 0.0,
        "seconds_saved": round(counts.saved_s, 3),
    }


def _sources(counts: DecodingCounts) -> list[dict[str, Any]]:
    """Sources of drafts, the busiest first."""
    accepted = counts.accepted_by_source
    busiest = sorted(counts.drafted_by_source.items(), key=lambda entry: (-entry[1], entry[0]))
    return [{"source": name, "drafted": drafted, "accepted": accepted.get(name, 0)} for name, drafted in busiest]


def _verifier(card: VerifierCard) -> dict[str, Any]:
    return {
        "model": card.model,
        "running": card.running,
        "waiting": card.waiting,
        "cache_used": _used((card,)),
        "drafters": dict(card.drafters),
    }
