"""Judges a run by what users saw: tokens, ends, pauses, limits, audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from speculation.types import SamplingParams
from tests.simulation.access import of_access
from tests.simulation.assets import GRAMMARS, SharedGrammars
from tests.simulation.changes import of_changes
from tests.simulation.ends import of_end
from tests.simulation.law import plain_answer
from tests.simulation.pauses import of_pauses
from tests.simulation.schedule import NEW_WEIGHTS, OTHER_WEIGHTS
from tests.simulation.users import Call

if TYPE_CHECKING:
    from tests.simulation.world import World


def problems(world: World) -> list[str]:
    """Everything that is wrong with a run."""
    found = [*of_access(world), *of_changes(world)]
    for call in world.calls:
        found += of_tokens(call, weights_for(world, call))
        if len(call.outcomes) != 1:
            found.append(f"{call.name}: has {len(call.outcomes)} ends: {call.outcomes}")
        else:
            found += [*of_end(world, call), *of_pauses(world, call)]
    return found


def weights_for(world: World, call: Call) -> Sequence[int]:
    """The weights of which some may have chosen all of an answer's tokens."""
    first = (0, OTHER_WEIGHTS) if world.schedule.setup.two_weights else (0,)
    for change in world.reloads:
        served = change.done_at is not None and change.done_at <= call.came_at[0]
        alone = served and change.lives == [each.lives for each in world.verifiers]
        # A verifier that has been started since may serve the first ones, if there was none to ask.
        first = (NEW_WEIGHTS,) if alone else (*first, NEW_WEIGHTS)
    return first


def of_tokens(call: Call, weights: Sequence[int]) -> Iterator[str]:
    """What is wrong with an answer's tokens: they must be those of a verifier with some of these weights, of one alone."""
    wants = [list(answer_of(call, each)) for each in weights]
    fitting = [want for want in wants if call.tokens == want[: len(call.tokens)]]
    if not fitting:
        yield f"{call.name}: {call.tokens} is no beginning of {' or '.join(map(str, wants))}"
    elif call.outcomes == ["ok"] and call.tokens not in fitting:
        yield f"{call.name}: finished with {len(call.tokens)} of {len(fitting[0])} tokens"


def answer_of(call: Call, weights: int) -> tuple[int, ...]:
    """The whole answer, by plain decoding."""
    ask = call.ask
    return _answer(ask.prompt, ask.temperature, ask.seed, ask.max_tokens, ask.ignore_eos, ask.grammar, weights)


@lru_cache(4096)
def _answer(
    prompt: tuple[int, ...],
    temperature: float,
    seed: int,
    max_tokens: int,
    ignore_eos: bool,
    grammar: int | None,
    weights: int,
) -> tuple[int, ...]:
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos and grammar is None
    )
    allowed = None if grammar is None else SharedGrammars()._open(GRAMMARS[grammar], ()).allowed
    return tuple(plain_answer(prompt, params, max_tokens, allowed, weights))
