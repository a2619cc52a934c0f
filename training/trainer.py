"""The training loop: one plain loop for every model, which goes on where it was interrupted, bit by bit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from speculation.errors import ConfigurationError, OutriderError
from training.batches import Place, micro_batches, next_batch, randomness
from training.learner import Learner, trained
from training.optimizer import Optimizer
from training.recipe import RecipeBase, parse_recipe
from training.shards import Shards
from training.snapshots import RunState, newest_whole, read_snapshot, write_snapshot

# Steps that the reported speed is a mean of.
_RECENT = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProgress:
    """What is reported after a step.

    Attributes:
        loss: mean over the step's predictions.
        losses: what it is made of, see ``Tally.parts``, as means over the predictions.
        acceptance: mean chance that the first drafted token is accepted.
        rows_per_s: predictions a second, lately.
        left_s: seconds to the last step, at this speed.
        validation: score on the validation split, after steps that look at it.
    """

    step: int
    steps: int
    loss: float
    acceptance: float
    rate: float
    norm: float
    rows_per_s: float
    left_s: float
    validation: float | None = None
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Made:
    """What a step gave: means over its predictions, and how many there were."""

    loss: float
    losses: dict[str, float]
    acceptance: float
    norm: float
    rows: int


@dataclass(kw_only=True, slots=True)
class RunLimits:
    """When a run ends before its last step.

    Attributes:
        deadline: on the monotonic clock, in seconds; None: never.
        save_every_s: seconds between checkpoints.
        stop: whether to save and leave after the present step; a signal handler may change the answer.
    """

    deadline: float | None = None
    save_every_s: float = 600.0
    stop: Callable[[], bool] = field(default=lambda: False)


class Trainer:
    """Trains one model in one folder.

    Args:
        fresh: the state of a run that begins; its hashes must be those of an earlier run in the folder.
        validate: a score of the model as it is, higher is better; None: there is nothing to measure it on, and no best.

    Raises:
        ConfigurationError: the folder holds a run of another recipe, target, vocabulary or data, or no whole checkpoint.
    """

    def __init__(
        self,
        learner: Learner,
        shards: Shards,
        recipe: RecipeBase,
        folder: Path,
        fresh: RunState,
        validate: Callable[[], float | None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._learner = learner
        self._shards = shards
        self._recipe = recipe
        self._folder = folder
        self._validate = validate
        self._parameters = trained(learner.module)
        self._optimizer = Optimizer(self._parameters, recipe, len(learner.ids))
        self.state = fresh
        self._lengths = shards.lengths
        found = newest_whole(folder)
        if found is not None:
            for fault in found[1]:
                say(f"{fault}; going on from {found[0].name}")
            self._resume(found[0])

    def run(self, limits: RunLimits, report: Callable[[StepProgress], None]) -> bool:
        """Train until the last step or a limit, and save. Returns whether the last step was made.

        Raises:
            OutriderError: the loss is no longer a number; the last checkpoint is whole.
            ResourceExhausted: a checkpoint cannot be written.
        """
        if not self._lengths:
            raise ConfigurationError("the data hold no sequence of the training split", about="the data")
        times: list[tuple[float, int]] = [(time.monotonic(), 0)]
        saved_at, saved_step = time.monotonic(), self.state.step
        while self.state.step < self._recipe.steps:
            made = self._step()
            times = [*times[-_RECENT:], (time.monotonic(), made.rows)]
            spent = times[-1][0] - times[0][0]
            step, last = self.state.step, self.state.step == self._recipe.steps
            late = limits.deadline is not None and time.monotonic() >= limits.deadline
            # Out of time, the run may never go on, and is exported at its best look.
            looked = last or late or step % self._recipe.evaluate_every == 0
            score = self._look() if looked else None
            report(
                StepProgress(
                    step=step,
                    steps=self._recipe.steps,
                    loss=made.loss,
                    losses=made.losses,
                    acceptance=made.acceptance,
                    rate=self._optimizer.rate(step - 1),
                    norm=made.norm,
                    rows_per_s=sum(count for _, count in times[1:]) / max(spent, 1e-9),
                    left_s=(self._recipe.steps - step) * spent / (len(times) - 1),
                    validation=score,
                )
            )
            now = time.monotonic()
            ends = late or limits.stop()
            if looked or ends or now - saved_at >= limits.save_every_s:
                self._save()
                saved_at, saved_step = time.monotonic(), step
            if looked:
                # What the look took is no part of the speed.
                times = [(time.monotonic(), 0)]
            if ends:
                break
        if saved_step != self.state.step:
            self._save()
        return self.state.step == self._recipe.steps

    def _step(self) -> _Made:
        state, recipe, lengths = self.state, self._recipe, self._lengths
        place = Place(state.epoch, state.sequences, state.offset)
        indices, place = next_batch(place, lengths, recipe)
        loss = overlap = 0.0
        rows = 0
        losses: defaultdict[str, float] = defaultdict(float)
        for part, members in enumerate(micro_batches(indices, lengths, recipe)):
            sequences = [self._shards.sequence(index) for index in members]
            tally = self._learner.lose(sequences, randomness(recipe, state.step, part), state.step / recipe.steps)
            tally.loss.backward()  # type: ignore[no-untyped-call]
            loss, rows, overlap = loss + float(tally.loss.detach()), rows + tally.rows, overlap + tally.overlap
            for name, value in tally.parts.items():
                losses[name] += value
        if loss != loss or loss in (float("inf"), float("-inf")):
            raise OutriderError(
                f"the loss of step {state.step + 1} is {loss}: a smaller learning_rate or clip_norm may help; "
                "the last checkpoint is whole"
            )
        norm = self._optimizer.make_step(state.step, rows)
        self.state = state.model_copy(
            update={
                "step": state.step + 1,
                "epoch": place.epoch,
                "sequences": place.sequences,
                "offset": place.offset,
                "rows": state.rows + rows,
            }
        )
        most = max(1, rows)
        means = {name: value / most for name, value in losses.items()}
        return _Made(loss / most, means, overlap / most, norm, rows)

    def _look(self) -> float | None:
        module = self._learner.module
        # A draft model is trained as it is loaded, without dropout: none before the first look, and none behind it.
        training = module.training
        module.eval()
        with torch.no_grad():
            score = self._validate()
        module.train(training)
        if score is not None and (self.state.best_score is None or score > self.state.best_score):
            self.state = self.state.model_copy(update={"best_step": self.state.step, "best_score": score})
        return score

    def _save(self) -> None:
        write_snapshot(self._folder, self.state, self._parameters, self._optimizer.tensors())

    def _resume(self, snapshot: Path) -> None:
        state, model, optimizer = read_snapshot(snapshot)
        for what, old, new in _differences(state, self.state):
            raise ConfigurationError(
                f"{self._folder} holds a run with {what} {old}, not {new}: give another folder, or begin again with --fresh",
                about=self._folder,
            )
        if state.sequences > len(self._lengths):
            raise ConfigurationError(
                f"{self._folder} holds a run whose present epoch has {state.sequences} sequences, and the data hold "
                f"{len(self._lengths)} now: complete them with outrider train data, or begin again with --fresh",
                about=self._folder,
            )
        if sorted(model) != sorted(self._parameters):
            raise ConfigurationError(
                f"{snapshot} holds other parameters than the recipe's model: give another folder", about=snapshot
            )
        with torch.no_grad():
            for name, tensor in model.items():
                self._parameters[name].copy_(tensor)
        self._optimizer.restore(optimizer)
        # The steps may be more than they were.
        self.state = state.model_copy(update={"recipe": self.state.recipe})


def _differences(old: RunState, new: RunState) -> list[tuple[str, object, object]]:
    """What may not change within a run: everything but the number of steps."""
    found: list[tuple[str, object, object]] = [
        (name, getattr(old, name), getattr(new, name))
        for name in ("target", "layers", "vocabulary", "data", "start")
        if getattr(old, name) != getattr(new, name)
    ]
    # Keys that came later have their defaults in older runs.
    before, now = parse_recipe(old.recipe, "the run's recipe").model_dump(mode="json"), new.model_dump()["recipe"]
    for key in sorted({*before, *now} - {"steps"}):
        if before.get(key) != now.get(key):
            found.append((f"recipe's {key}", before.get(key), now.get(key)))
    return found
