"""What a request is told of each of its passes."""

from __future__ import annotations

from dataclasses import dataclass

from services.verifier.engine.passes import Part
from speculation.messages import PassReport, Progress
from speculation.records import maker
from speculation.tree import ROOT
from speculation.types import TokenTree, Verdict

_make_progress = maker(Progress)


@dataclass(frozen=True, slots=True)
class PassFigures:
    """What all requests of a pass are told alike; fields as in ``PassReport`` and ``Progress``."""

    seconds: float
    waited_s: float
    requests: int
    arithmetic: str


def progress_of(part: Part, verdict: Verdict, figures: PassFigures) -> Progress:
    """What a pass brought to its request, which it tells only once."""
    request, tree = part.request, part.tree
    if verdict.finish_reason is not None:
        request.switches.end(request.generated)
    return _make_progress(
        token_ids=verdict.committed,
        queue_s=request.queue_s,
        cached_tokens=request.cached,
        num_drafted=len(tree.tokens) - len(tree.probes),
        accepted_sources=tuple([tree.sources[node] for node in verdict.accepted_path]) if verdict.accepted_path else (),
        logprobs=verdict.logprobs,
        prompt_logprobs=request.scores.take() if request.scores.wanted else (),
        switches=request.switches.take(),
        saved_s=part.saved_s,
        arithmetic="" if request.told else figures.arithmetic,
        restarted=request.void and not request.told,
        report=report_of(part, verdict, figures) if request.message.plan.report_passes else None,
    )


def report_of(part: Part, verdict: Verdict, figures: PassFigures) -> PassReport:
    """The report of one request's part of a pass."""
    tree, place, checked = _checked_first(part.tree, part.drafted)
    return PassReport(
        tree=tree,
        checked=checked,
        accepted_path=tuple([place[node] for node in verdict.accepted_path]),
        seconds=figures.seconds,
        waited_s=figures.waited_s,
        requests=figures.requests,
    )


def _checked_first(checked: TokenTree, drafted: TokenTree) -> tuple[TokenTree, dict[int, int], int]:
    """The nodes of ``checked``, then those of ``drafted`` that it lacks; probes are in neither.

    ``checked`` is the part of ``drafted`` that the budget chose. A node is known by its parent and its token.

    >>> from speculation.tree import chain
    >>> tree, place, count = _checked_first(chain([7], "suffix", [0.5]), chain([7, 8], "suffix", [0.5, 0.25]))
    >>> tree.tokens, tree.parents, count
    ((7, 8), (-1, 0), 1)

    Returns:
        The tree, where in it the nodes of ``checked`` are, and how many of them there are.
    """
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    scores: list[float] = []
    known: dict[tuple[int, int], int] = {}

    def add(tree: TokenTree, node: int, parent: int) -> int:
        tokens.append(tree.tokens[node])
        parents.append(parent)
        sources.append(tree.sources[node])
        scores.extend(tree.scores[node : node + 1])
        return len(tokens) - 1

    place, of_drafted = {ROOT: ROOT}, {ROOT: ROOT}
    for node in _nodes(checked):
        parent = place[checked.parents[node]]
        place[node] = add(checked, node, parent)
        known.setdefault((parent, checked.tokens[node]), place[node])
    count = len(tokens)
    for node in _nodes(drafted) if drafted is not checked else ():
        parent = of_drafted[drafted.parents[node]]
        at = known.get((parent, drafted.tokens[node]))
        of_drafted[node] = at if at is not None else add(drafted, node, parent)
        known.setdefault((parent, drafted.tokens[node]), of_drafted[node])
    tree = TokenTree(tokens=tuple(tokens), parents=tuple(parents), sources=tuple(sources), scores=tuple(scores))
    return tree, place, count


def _nodes(tree: TokenTree) -> list[int]:
    """The nodes that can be accepted."""
    probes = set(tree.probes)
    return [node for node in range(len(tree)) if node not in probes]
