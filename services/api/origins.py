"""What users who ask are told of an answer: where its tokens come from, and what other strategies would have made of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOrigin:
    """Who guessed a token (``speculation.sources.TARGET``: nobody), and how many characters it adds to the answer."""

    source: str
    text_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedNodes:
    """Nodes of a tree; all fields have one entry for each.

    ``texts`` are those of single tokens: of one within a character, the character that stands for broken ones. ``parents``:
    an earlier node, or -1. ``probabilities``: claimed by the source for the whole path to the node.
    """

    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedPass:
    """A pass over a request's drafts.

    Attributes:
        checked: the nodes that the target checked.
        dropped: those that drafters proposed and the budget left out. As parents, they are counted behind the checked ones.
        accepted: the checked nodes whose tokens the answer has, in order.
        committed: tokens that the pass brought.
        pass_s: seconds from the pass's beginning until its tokens were known.
        wait_s: seconds for which the pass waited for drafts before.
        requests: how many requests shared the pass.
    """

    checked: DraftedNodes
    dropped: DraftedNodes
    accepted: tuple[int, ...]
    committed: int
    pass_s: float
    wait_s: float
    requests: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedStrategy:
    """What an answer would have taken under another strategy. None: not known.

    Attributes:
        num_passes: passes that bring tokens, the prompt's included.
        seconds: of all passes behind that one and of their drafts, by the measured costs of a request that decodes alone.
        exact: the replay told its drafters all that passes would; otherwise they may have taken somewhat fewer passes.
        without: sources of the strategy that were left out, since they run a model or read hidden states.
    """

    strategy: str
    num_passes: int | None
    tokens_per_pass: float | None
    seconds: float | None
    exact: bool
    without: tuple[str, ...] = ()
