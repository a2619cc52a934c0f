"""What a trained drafter is worth, on the target's own text that it has not seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from services.drafter.sources.interfaces import ModelSource
from training.learner import Learner, Prediction
from training.losses import TargetChoices, output_rows
from training.shards import TrainingSequence
from training.tree_replay import passes_of, tokens_per_pass

_CHUNK = 128
_BINS = 15
# Tokens that are computed at a time.
_ROWS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainFigures:
    """One domain's figures; index i of a list is about the token that is drafted after i others.

    Attributes:
        rows: predictions of the first token.
        agreement: how often the drafter's likeliest token is the target's, after i tokens of the text.
        overlap: mean of sum min(p, q) over the whole vocabulary: the chance that a token drawn from q is accepted.
        tau_greedy, tau_overlap: tokens per target pass of a chain as long as the lists, 1 + the sum of the products of
            agreement, or of overlap.
        recall: how often the target's likeliest token is in the draft vocabulary; no agreement is above it.
        calibration_error: expected difference between the probability of the drafter's likeliest first token and how often
            it is the target's (15 bins).
        tree: tokens per target pass with trees of so many nodes, by replay.
        tree_sampled: the same, on text that was sampled.
    """

    rows: int
    agreement: list[float]
    overlap: list[float]
    tau_greedy: float
    tau_overlap: float
    recall: float
    calibration_error: float
    tree: dict[int, float] = field(default_factory=dict)
    tree_sampled: dict[int, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values, rounded to five digits."""

        def rounded(value: Any) -> Any:
            if isinstance(value, dict):
                return {str(key): rounded(each) for key, each in value.items()}
            if isinstance(value, list):
                return [rounded(each) for each in value]
            return round(value, 5) if isinstance(value, float) else value

        found: dict[str, Any] = rounded(asdict(self))
        return found


class _Sums:
    """Running sums of one domain."""

    def __init__(self, steps: int) -> None:
        self._rows = [0] * steps
        self._agree = [0.0] * steps
        self._overlap = [0.0] * steps
        self._held = 0.0
        # By bin of the probability: rows, sum of probabilities, how often the token was the target's.
        self._bins = torch.zeros(3, _BINS, dtype=torch.float64)

    def add(self, step: int, prediction: Prediction, learner: Learner, target: TargetChoices) -> None:
        """Add what a step predicted."""
        output = output_rows(learner.rows, learner.own_rows, prediction.hidden.shape[1])
        for start in range(0, len(prediction.states), _CHUNK):
            part = slice(start, start + _CHUNK)
            states = prediction.states[part]
            norms, best = target.at(prediction.positions[part], states)
            p = (states @ learner.rows.T - norms[:, None]).exp()
            q = (prediction.hidden[part] @ output.T).softmax(-1)
            likely, drafted = q.max(-1)
            agree = learner.ids[drafted] == best
            self._rows[step] += len(best)
            self._agree[step] += float(agree.sum())
            self._overlap[step] += float(torch.minimum(p, q).sum())
            if step == 0:
                self._held += float(torch.isin(best, learner.ids).sum())
                bins = (likely * _BINS).long().clamp(max=_BINS - 1).cpu()
                for row, values in enumerate((torch.ones_like(likely), likely, agree)):
                    self._bins[row].index_add_(0, bins, values.double().cpu())

    def join(self, other: _Sums) -> None:
        """Add another's sums."""
        self._rows = [one + more for one, more in zip(self._rows, other._rows, strict=True)]
        self._agree = [one + more for one, more in zip(self._agree, other._agree, strict=True)]
        self._overlap = [one + more for one, more in zip(self._overlap, other._overlap, strict=True)]
        self._held += other._held
        self._bins += other._bins

    def result(self) -> DomainFigures:
        """The figures."""
        agreement = [agree / max(1, rows) for agree, rows in zip(self._agree, self._rows, strict=True)]
        overlap = [each / max(1, rows) for each, rows in zip(self._overlap, self._rows, strict=True)]
        first = max(1, self._rows[0])
        return DomainFigures(
            rows=self._rows[0],
            agreement=agreement,
            overlap=overlap,
            tau_greedy=chain_tau(agreement),
            tau_overlap=chain_tau(overlap),
            recall=self._held / first,
            calibration_error=float((self._bins[1] - self._bins[2]).abs().sum()) / first,
        )


def chain_tau(chances: Sequence[float]) -> float:
    """Tokens per target pass of a chain whose i-th token is accepted with ``chances[i]``, given the ones before it."""
    total, product = 1.0, 1.0
    for chance in chances:
        product *= chance
        total += product
    return total


def measure(
    learner: Learner, sequences: Iterable[TrainingSequence], steps: int, output: torch.Tensor
) -> Mapping[str, DomainFigures]:
    """The figures of each domain, and of ``all``.

    Args:
        output: [V, h] all of the target's output rows, float32.
    """
    sums: dict[str, _Sums] = {}
    with torch.inference_mode():
        for domain, members in _grouped(sequences):
            target = TargetChoices(output)
            for step, prediction in enumerate(learner.predict(members, steps)):
                sums.setdefault(domain, _Sums(steps)).add(step, prediction, learner, target)
    everything = _Sums(steps)
    for each in sums.values():
        everything.join(each)
    return {domain: sums[domain].result() for domain in sorted(sums)} | {"all": everything.result()}


def _grouped(sequences: Iterable[TrainingSequence]) -> Iterator[tuple[str, list[TrainingSequence]]]:
    """Parts of some thousand tokens, each of one domain."""
    waiting: dict[str, list[TrainingSequence]] = {}
    for sequence in sequences:
        if len(sequence.tokens) - sequence.prompt_length < 2:
            continue
        part = waiting.setdefault(sequence.domain, [])
        part.append(sequence)
        if sum(len(each.tokens) for each in part) >= _ROWS:
            yield sequence.domain, waiting.pop(sequence.domain)
    yield from waiting.items()


def tree_taus(
    source: ModelSource,
    sequences: Iterable[TrainingSequence],
    sizes: Sequence[int],
    most: int,
    layers: tuple[int, ...] = (-1,),
) -> Mapping[str, tuple[dict[int, float], dict[int, float]]]:
    """Tokens per target pass with trees of each of ``sizes`` nodes, by replay: by domain, of greedy and of sampled text.

    Args:
        most: sequences of each domain and kind that are replayed.
        layers: of the sequences' states.
    """
    chosen: dict[tuple[str, bool], list[TrainingSequence]] = {}
    for sequence in sequences:
        if len(sequence.tokens) - sequence.prompt_length >= 2:
            members = chosen.setdefault((sequence.domain, sequence.temperature > 0), [])
            if len(members) < most:
                members.append(sequence)
    groups = dict(chosen)
    for sampled in (False, True):
        if any(kind == sampled for _, kind in chosen):
            groups["all", sampled] = [each for (_, kind), members in chosen.items() if kind == sampled for each in members]
    everything = [each for members in chosen.values() for each in members]
    found: dict[str, tuple[dict[int, float], dict[int, float]]] = {domain: ({}, {}) for domain, _ in groups}
    for nodes in sizes:
        # All together: products over many rows are cheaper.
        passes = {
            id(each): count for each, count in zip(everything, passes_of(source, everything, nodes, layers), strict=True)
        }
        for (domain, sampled), members in groups.items():
            found[domain][sampled][nodes] = tokens_per_pass(members, [passes[id(each)] for each in members])
    return found


def quick_score(learner: Learner, held_out: Iterable[TrainingSequence], steps: int, most_rows: int) -> float | None:
    """A chain's tokens per target pass by overlap over the draft vocabulary alone, on the first ``most_rows`` tokens of
    ``held_out``: enough to tell which of two checkpoints is better. None: no answer there has two tokens."""
    overlap, rows = [0.0] * steps, [0] * steps
    chosen: list[TrainingSequence] = []
    total = 0
    for sequence in held_out:
        chosen.append(sequence)
        total += len(sequence.tokens)
        if total >= most_rows:
            break
    for _, members in _grouped(chosen):
        for step, prediction in enumerate(learner.predict(members, steps)):
            output = output_rows(learner.rows, learner.own_rows, prediction.hidden.shape[1])
            for start in range(0, len(prediction.states), _CHUNK):
                part = slice(start, start + _CHUNK)
                p = (prediction.states[part] @ learner.rows.T).softmax(-1)
                q = (prediction.hidden[part] @ output.T).softmax(-1)
                overlap[step] += float(torch.minimum(p, q).sum())
                rows[step] += len(p)
    if not any(rows):
        return None
    return chain_tau([each / max(1, count) for each, count in zip(overlap, rows, strict=True)])
