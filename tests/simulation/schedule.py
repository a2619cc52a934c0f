"""What happens in a run: settings, requests and faults, all drawn from a seed. A part of it can be left out."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.verifier.kv_cache.pool import BLOCK
from tests.simulation.assets import GRAMMARS
from tests.simulation.fault_points import drawn
from tests.simulation.law import LETTERS

TENANTS = ("a", "b", "c")
# Whose key has limits; and the weights of a verifier that does not have the others'.
LIMITED, OTHER_WEIGHTS = "c", 12345
# Those that take the place of all others while they serve.
NEW_WEIGHTS = 777
MAX_NODES = 6
_STRATEGIES = ("autoregressive", "prompt_lookup", "suffix", "suffix", "blend", "auto")


class Setup(NamedTuple):
    """Settings of a run; the loop's are named as in ``LoopConfig``."""

    blocks: int
    max_num_seqs: int
    max_waiting: int
    max_wait_s: float | None
    max_batched_tokens: int
    measured: bool
    pass_s: float
    delay_s: float
    drafters: tuple[str, ...]
    retrieval: bool
    timeout_s: float
    # Limits of tenant c's key.
    max_concurrent: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    # The second verifier has other weights, as it may while they are changed.
    two_weights: bool = False
    # How many states a target keeps whose layers have some; None: they have none.
    kept_states: int | None = None
    # Pipeline stages of each target, so many passes of which are under way.
    stages: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A user's request.

    Attributes:
        at_s: when it comes.
        router: which one is asked first.
        leaves_after: tokens after which the user goes away; None: stays to the end.
        patience_s: seconds after which it gives up; None: never.
    """

    at_s: float
    tenant: str
    router: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    strategy: str
    grammar: int | None
    priority: int
    leaves_after: int | None
    patience_s: float | None = None


class Event(NamedTuple):
    """Something that happens to a component (``on``; of a cut, also ``to``), and how long it lasts."""

    at_s: float
    kind: str
    on: str
    lasts_s: float
    to: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A run.

    Attributes:
        points: as ``FaultPoints.at_work``.
    """

    seed: int
    setup: Setup
    asks: tuple[Ask, ...]
    events: tuple[Event, ...]
    points: tuple[str, ...]

    def only(self, asks: Collection[int], events: Collection[int], points: Collection[str]) -> Schedule:
        """The part with these requests, events (by their numbers) and points."""
        return replace(
            self,
            asks=tuple(ask for number, ask in enumerate(self.asks) if number in asks),
            events=tuple(event for number, event in enumerate(self.events) if number in events),
            points=tuple(point for point in self.points if point in points),
        )


def schedule_of(seed: int) -> Schedule:
    """The schedule of a seed: mostly a few short answers; one in sixteen a crowd of them, one in 64 a crowd of long ones."""
    source = random.Random(seed)
    crowd = source.random() < 1 / 16
    large = crowd and source.random() < 1 / 4
    setup = _setup(source, large)
    count = source.randint(5, 10) if crowd else source.choice((1, 1, 2, 2, 3))
    spread_s = source.choice((0.02, 0.3, 3.0))
    tenants = source.choice((("a",), ("a", "c"), ("c",), TENANTS, TENANTS))
    # In a tight one, prompts end shortly before a block's end, so that answers need another block when there is none.
    tight = crowd and not large and source.random() < 1 / 2
    lengths = (3, 66, 130) if large else (56,) if tight else (1, 3, 10, 66, 66, 70)
    asks = tuple(sorted((_ask(source, spread_s, tenants, lengths, large) for _ in range(count)), key=lambda ask: ask.at_s))
    # Every request fits into the cache, alone.
    rows = max(len(ask.prompt) + ask.max_tokens for ask in asks) + 2 * MAX_NODES
    blocks = -(-rows // BLOCK) + (1 if tight else setup.blocks)
    setup = setup._replace(blocks=blocks, max_num_seqs=4 if tight else setup.max_num_seqs)
    faults = source.randint(2, 6) if crowd else source.choice((0, 1, 1, 2, 3))
    kinds = ["kill verifier" if crowd and source.random() < 1 / 2 else None for _ in range(faults)]
    events = tuple(sorted(_event(source, setup, spread_s, kind) for kind in kinds))
    # Drawn apart, so that what stands above is what it was before there was this.
    later = random.Random(f"later {seed}")
    asks = tuple(replace(ask, patience_s=later.choice(_PATIENCE_S)) for ask in asks)
    setup = setup._replace(two_weights=later.random() < _TWO_WEIGHTS)
    if later.random() < _NEW_KEY:
        events += (Event(later.random() * spread_s, "replace key", ROUTERS[0], 0.0, later.choice(tenants)),)
    setup = setup._replace(kept_states=later.choice(_KEPT_STATES))
    events += _changes(later, setup, spread_s)
    # And so is this.
    staged = random.Random(f"stages {seed}")
    setup = setup._replace(stages=staged.choice(_STAGES))
    events += _lost_in_changes(staged, events)
    return Schedule(seed=seed, setup=setup, asks=asks, events=events, points=drawn(source))


# Who gives up, and after how long; how often a schedule has verifiers of two weights, or a key that is replaced; and how many
# states targets keep.
_PATIENCE_S = (*(None,) * 12, 0.03, 0.3, 3.0)
_TWO_WEIGHTS, _NEW_KEY = 0.15, 0.15
_KEPT_STATES = (None, None, 1, 3)
# How often decoding is paused and weights are replaced, and with something that happens shortly afterwards.
_PAUSED, _RELOADED, _TROUBLED = 0.1, 0.1, 0.6
# Stages of targets; and how often one of them dies, or a pass fails, shortly after that.
_STAGES, _LOST = (1, 1, 1, 2, 3), 0.5


def _changes(later: random.Random, setup: Setup, spread_s: float) -> tuple[Event, ...]:
    """What operators do, and faults in the midst of it."""
    found: tuple[Event, ...] = ()
    for often, kind, lasts_s, how in (
        (_PAUSED, "pause", (0.3, 3.0, 20.0), ("keep", "wait")),
        (_RELOADED, "reload", (0.0,), ("finish", "restart")),
    ):
        if later.random() >= often:
            continue
        at_s, on = later.random() * (spread_s + 10 * setup.pass_s), later.choice(ROUTERS)
        found += (Event(at_s, kind, on, later.choice(lasts_s), later.choice(how)),)
        if later.random() < _TROUBLED:
            kind = later.choice(("kill verifier", "freeze verifier", "cut verifier", "kill router", "freeze router"))
            found += (_event(later, setup, 0.0, kind)._replace(at_s=at_s + later.random() * later.choice((0.1, 1.0, 8.0))),)
    return found


def _lost_in_changes(staged: random.Random, events: Sequence[Event]) -> tuple[Event, ...]:
    """Stages that die in the midst of what operators do, or passes that fail or hang there."""
    found: tuple[Event, ...] = ()
    for event in events:
        if event.kind in ("pause", "reload") and staged.random() < _LOST:
            kind = staged.choice(("lose target", "lose target", "fail pass", "hang pass"))
            at_s = event.at_s + staged.random() * staged.choice((0.02, 0.2, 2.0))
            found += (Event(at_s, kind, staged.choice(VERIFIERS), staged.choice(_KINDS[kind][1])),)
    return found


def _setup(source: random.Random, large: bool) -> Setup:
    choice = source.choice
    return Setup(
        blocks=choice((0, 1, 2, 60)),
        max_num_seqs=choice((1, 2, 4)),
        max_waiting=choice((0, 1, 3, 64)),
        max_wait_s=choice((None, None, 1.0)),
        max_batched_tokens=choice((7, 64, 256)),
        measured=source.random() < 0.3,
        pass_s=choice((0.005, 0.02, 0.1)),
        delay_s=choice((0.0002, 0.002, 0.02)),
        drafters=choice(
            (("text",), ("text", "knowing"), ("knowing", "hostile"), ("text", "knowing", "hostile"), ("hostile",))
        ),
        retrieval=source.random() < 0.15,
        timeout_s=choice((20.0, 60.0)),
        max_concurrent=choice((None, 1, 2)),
        requests_per_minute=choice((None, None, 2)),
        tokens_per_minute=choice((None, None, 200 if large else 100)),
    )


def _ask(source: random.Random, spread_s: float, tenants: Sequence[str], lengths: Sequence[int], large: bool) -> Ask:
    choice = source.choice
    # Few beginnings, so that prefixes are shared; a block of the cache has 64 tokens.
    beginning = random.Random(choice((1, 1, 2)))
    length = choice(lengths)
    prompt = (*tuple(beginning.choice(LETTERS) for _ in range(length)), choice(LETTERS))
    return Ask(
        at_s=source.random() * spread_s,
        tenant=choice(tenants),
        router=source.randrange(2),
        prompt=prompt,
        max_tokens=choice((1, 2, 4, 9) if not large else (8, 30, 60)),
        temperature=choice((0.0, 1.0)),
        seed=source.randrange(1000),
        ignore_eos=source.random() < 0.7,
        strategy=choice(_STRATEGIES),
        grammar=source.randrange(len(GRAMMARS)) if source.random() < 0.08 else None,
        priority=choice((0, 0, 0, 1)),
        leaves_after=source.randint(0, 6) if source.random() < 0.15 else None,
    )


# How often each kind of event comes, and how long it may last.
_KINDS: dict[str, tuple[int, tuple[float, ...]]] = {
    "kill verifier": (4, (0.1, 1.0, 8.0)),
    "freeze verifier": (2, (0.3, 3.0, 20.0)),
    "cut verifier": (2, (0.5, 3.0, 12.0)),
    "fail pass": (1, (0.0,)),
    "lose target": (1, (0.0,)),
    "hang pass": (1, (0.5, 7.0, 30.0)),
    "kill drafter": (1, (0.1, 2.0)),
    "freeze drafter": (1, (0.3, 5.0)),
    "cut drafter": (1, (0.5, 8.0)),
    "kill router": (1, (0.5, 3.0)),
    "freeze router": (1, (0.5, 3.0, 20.0)),
    "forget": (2, (0.0,)),
    "revoke key": (1, (0.0,)),
    "kill retrieval": (1, (0.5, 3.0)),
    "redis down": (1, (1.0, 10.0)),
    "new index": (1, (0.0,)),
}
VERIFIERS, ROUTERS, RETRIEVAL = ("verifier 0", "verifier 1"), ("router 0", "router 1"), "retrieval"


def _event(source: random.Random, setup: Setup, spread_s: float, given: str | None) -> Event:
    kinds = [kind for kind in _KINDS if setup.retrieval or kind not in ("kill retrieval", "redis down", "new index")]
    kind = given or source.choices(kinds, [_KINDS[kind][0] for kind in kinds])[0]
    at_s = source.random() * (spread_s + 10 * setup.pass_s)
    lasts_s = source.choice(_KINDS[kind][1])
    what = kind.rpartition(" ")[2]
    if kind == "cut drafter":
        return Event(at_s, kind, source.choice(VERIFIERS), lasts_s, source.choice(setup.drafters))
    if what == "drafter":
        return Event(at_s, kind, source.choice(setup.drafters), lasts_s)
    if what in ("router", "key", "forget"):
        on = source.choice(ROUTERS)
        return Event(at_s, kind, on, lasts_s, "" if what == "router" else source.choice(TENANTS))
    if kind == "cut verifier":
        return Event(at_s, kind, source.choice(ROUTERS), lasts_s, source.choice(VERIFIERS))
    return Event(at_s, kind, RETRIEVAL if what in ("retrieval", "down", "index") else source.choice(VERIFIERS), lasts_s)
