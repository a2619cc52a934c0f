"""Judges a run by what users saw: tokens, ends, pauses, limits, audit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from speculation.types import SamplingParams
from tests.simulation.access import of_access
from tests.simulation.assets import GRAMMARS, SharedGrammars
from tests.simulation.ends import of_end
from tests.simulation.law import plain_answer
from tests.simulation.pauses import of_pauses
from tests.simulation.users import Call

if TYPE_CHECKING:
    from tests.simulation.world import World


def problems(world: World) -> list[str]:
    """Everything that is wrong with a run."""
    found = list(of_access(world))
    for call in world.calls:
        found += of_tokens(call)
        if len(call.outcomes) != 1:
            found.append(f"{call.name}: has {len(call.outcomes)} ends: {call.outcomes}")
        else:
            found += [*of_end(world, call), *of_pauses(world, call)]
    return found


def of_tokens(call: Call) -> Iterator[str]:
    """What is wrong with an answer's tokens."""
    want = list(answer_of(call))
    if call.tokens != want[: len(call.tokens)]:
        yield f"{call.name}: {call.tokens} is no beginning of {want}"
    if call.outcomes == ["ok"] and call.tokens != want:
        yield f"{call.name}: finished with {len(call.tokens)} of {len(want)} tokens"


def answer_of(call: Call) -> tuple[int, ...]:
    """The whole answer, by plain decoding."""
    ask = call.ask
    return _answer(ask.prompt, ask.temperature, ask.seed, ask.max_tokens, ask.ignore_eos, ask.grammar)


@lru_cache(4096)
def _answer(
    prompt: tuple[int, ...], temperature: float, seed: int, max_tokens: int, ignore_eos: bool, grammar: int | None
) -> tuple[int, ...]:
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos and grammar is None
    )
    allowed = None if grammar is None else SharedGrammars()._open(GRAMMARS[grammar], ()).allowed
    return tuple(plain_answer(prompt, params, max_tokens, allowed))
