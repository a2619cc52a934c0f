"""Measures what ``arithmetic`` calculates with: the default model, then larger targets and the drafters at their sizes."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from benchmarks.bench.records import Prompt
from benchmarks.papers.engine import with_trained
from benchmarks.papers.workbench import PaperConfig, Workbench
from benchmarks.sizes.arithmetic import DraftedRow, PassCurve, SizeCosts, stacked
from benchmarks.sizes.default_model import PlainAnswers, decode_drafted, decode_plainly
from benchmarks.sizes.draft_cost import CostText, draft_seconds, joined
from benchmarks.sizes.scaled_drafter import grows, write_scaled
from benchmarks.sizes.stack import LAYERS, SIZES, Stack, measure_passes, numbers_of, own_shape, target_of, write_stack
from cluster.models.target import ResolvedModel
from cluster.settings.component_configs import drafter_config, verifier_config
from cluster.settings.config import Settings
from services.drafter.config import DrafterConfig
from services.drafter.heads import canary
from services.drafter.heads.files.kinds import Checkpoint, inspect
from services.drafter.sources.catalogue import make_source
from services.drafter.sources.interfaces import ModelSource
from speculation.errors import ConfigurationError

# Tokens before the rows of a measured pass, and of a text before the drafts.
_CONTEXT, _PROMPT = 256, 64

Told = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SizesConfig:
    """What to measure.

    Attributes:
        settings: with ``papers.engine.SETTINGS``.
        budgets: most nodes of trees.
        sizes: keys of ``stack.SIZES``, ascending.
        repeats: of each pass; ``drafts``: that are timed.
    """

    settings: Settings
    model: ResolvedModel
    prompts: Sequence[Prompt]
    max_tokens: int
    seed: int
    budgets: Sequence[int]
    sizes: Sequence[str]
    repeats: int
    drafts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSizes:
    """What was measured.

    Attributes:
        rows: of the default model.
        sizes: what steps cost; the first is the default model itself.
        numbers: parameters of each size.
        control: the default model's own shape, measured as the larger ones are.
        changed: answers that differ from plain decoding's.
    """

    rows: Sequence[DraftedRow]
    sizes: Sequence[SizeCosts]
    numbers: Mapping[str, int]
    control: SizeCosts
    changed: Sequence[str] = field(default=())

    @property
    def drafters(self) -> list[str]:
        """The drafters, in order."""
        return list(dict.fromkeys(row.drafter for row in self.rows if row.drafter))


def measure_sizes(config: SizesConfig, told: Told) -> MeasuredSizes:
    """Measure all.

    Raises:
        ConfigurationError: there is no drafter, a size is smaller than the model or does not fit into memory, or weights
            cannot be used.
    """
    bench = Workbench(
        PaperConfig(
            settings=config.settings,
            model=config.model,
            prompts=config.prompts,
            max_tokens=config.max_tokens,
            seed=config.seed,
        )
    )
    if not bench.checkpoints:
        raise ConfigurationError(
            f"no drafter comes along for {config.model.name}: name folders", field="--drafters", value="not given"
        )
    own, layers = own_shape(config.model.path)
    numbers = {size: numbers_of(config.model.path, *SIZES[size]) for size in config.sizes}
    mine = numbers_of(config.model.path, own.width, own.intermediate, layers)
    if (small := next((size for size, count in numbers.items() if count <= mine), None)) is not None:
        raise ConfigurationError(field="--sizes", value=small, allowed=f"larger than the model, {mine / 1e9:.3g} billion")
    try:
        plain = decode_plainly(bench.engine(), bench.requests, config.max_tokens, told)
        found = decode_drafted(bench.engine(), plain, list(bench.checkpoints), config.budgets, config.max_tokens, told)
    finally:
        bench.close()
    plain = replace(plain, step_s=found.plain_step_s)
    costs = _Costs(config, bench.checkpoints, plain, found.rows, told)
    first = costs.of_model(f"{mine / 1e9:.3g}")
    control = costs.of_size(first, first.size, (own.width, own.intermediate, layers))
    larger = [costs.of_size(first, size, SIZES[size]) for size in config.sizes]
    return MeasuredSizes(
        rows=found.rows,
        sizes=[first, *larger],
        numbers={first.size: mine, **numbers},
        control=control,
        changed=found.changed,
    )


class _Costs:
    """Measures what steps cost at one size after the other."""

    def __init__(
        self,
        config: SizesConfig,
        checkpoints: Mapping[str, Checkpoint],
        plain: PlainAnswers,
        rows: Sequence[DraftedRow],
        told: Told,
    ) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._plain = plain
        self._alone = {(row.drafter, row.budget): row for row in rows if row.drafter and not row.beside}
        self._told = told
        self._drafting = with_trained(drafter_config(config.settings, config.model), asked_for=False)
        self._target = verifier_config(config.settings, config.model).target
        self._shape, self._layers = own_shape(config.model.path)

    def of_model(self, size: str) -> SizeCosts:
        """The default model as it is served, with the drafters as they are."""
        self._told(f"passes of the model itself, {size} billion parameters")
        own = replace(self._target, enable_prefix_caching=False)
        curve = PassCurve(measure_passes({"own": own}, _CONTEXT, self._config.repeats)["own"])
        target = self._config.model.path
        drafts = {name: self._drafts(name, each, target, self._shape.width) for name, each in self._checkpoints.items()}
        rest = max(0.0, self._plain.step_s - curve.at(1))
        return SizeCosts(size=size, curve=curve, rest_s=rest, drafts_s=drafts)

    def of_size(self, first: SizeCosts, size: str, shape: tuple[int, int, int]) -> SizeCosts:
        """A larger target, with drafters that have grown with it."""
        with tempfile.TemporaryDirectory(prefix="outrider-sizes-") as scratch:
            self._told(f"passes at {size} billion parameters")
            stack = write_stack(self._config.model.path, Path(scratch), *shape)
            passes = measure_passes(
                {name: target_of(folder, self._target, _CONTEXT) for name, folder in stack.folders.items()},
                _CONTEXT,
                self._config.repeats,
            )
            curve = stacked(passes["one"], passes["several"], LAYERS, stack.layers)
            drafts = {
                name: self._scaled(name, each, stack) if grows(each) else first.drafts_s[name]
                for name, each in self._checkpoints.items()
            }
        return SizeCosts(size=size, curve=curve, rest_s=first.rest_s, drafts_s=drafts)

    def _scaled(self, name: str, checkpoint: Checkpoint, stack: Stack) -> dict[int, float]:
        target = stack.folders["several"]
        with tempfile.TemporaryDirectory(prefix="outrider-drafter-") as scratch:
            folder = write_scaled(checkpoint, self._shape, stack.shape, self._layers, Path(scratch) / "weights")
            with _without_canary():
                return self._drafts(name, inspect(folder, target), target, stack.shape.width)

    def _drafts(self, name: str, checkpoint: Checkpoint, target: Path, width: int) -> dict[int, float]:
        """Seconds of a draft by budget."""
        self._told(f"drafts of {name}, width {width}")
        config = with_trained(self._drafting, checkpoints={name: checkpoint.folder}, target=target)
        # As in service, each model has a thread of its own, on which it sets torch's threads.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._timed, name, config, checkpoint.layers, width).result()

    def _timed(self, name: str, config: DrafterConfig, layers: tuple[int, ...], width: int) -> dict[int, float]:
        source = cast(ModelSource, make_source(name, config))
        texts, drafts = [answer.tokens for answer in self._plain.answers], self._config.drafts
        found = {}
        for budget in self._config.budgets:
            tau = self._alone[name, budget].tau
            tokens = joined(texts, _PROMPT + int((drafts + 8) * (tau + 1)))
            text = CostText(tokens=tokens, prompt_length=_PROMPT, width=width, layers=layers)
            found[budget] = draft_seconds(source, text, budget, tau, drafts)
        return found


@contextmanager
def _without_canary() -> Iterator[None]:
    """Random weights have no canary, which need not be told."""
    log = logging.getLogger(canary.__name__)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
