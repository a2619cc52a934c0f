"""What the units of a paper share: the prompts, and one loaded target, opened when the first unit asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.bench.prompts import make_requests
from benchmarks.bench.records import Prompt, Request, TimedAnswer
from benchmarks.papers.engine import PaperEngine, RowDrafting
from benchmarks.papers.rows import DecodedRow, RowDecoder
from benchmarks.papers.shared_streams import SharedStreams
from benchmarks.papers.trained_runs import TrainedRun
from cluster.models.drafters import draft_models
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings
from services.drafter.heads.files.kinds import Checkpoint
from services.drafter.stopping.policies import classifier_of
from services.router.tokens import Tokens
from speculation.errors import ConfigurationError
from speculation.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperConfig:
    """What to measure.

    Attributes:
        settings: with those of ``engine.SETTINGS``.
        seed: request number n has the seed ``seed + n``.
        index: folder of an index of low-perplexity documents; ``unfiltered_index``: one of all documents;
            ``other_indexes``: of documents that were kept in other ways.
        classifier: DISCO's; None: the draft model's own, see ``Workbench.classifier``.
        repeats: of comparisons that are repeated.
        ablation: training runs of FSPAD's parts, which belong together.
        shared: streams with which the target itself was tuned; None: there are none.
    """

    settings: Settings
    model: ResolvedModel
    prompts: Sequence[Prompt]
    max_tokens: int
    seed: int
    index: Path | None = None
    unfiltered_index: Path | None = None
    other_indexes: Sequence[Path] = ()
    classifier: Path | None = None
    repeats: int = 1
    ablation: Sequence[TrainedRun] = ()
    shared: SharedStreams | None = None


class Workbench:
    """Opens the target once, and again where a unit needs streams in its passes."""

    def __init__(self, config: PaperConfig) -> None:
        self.config = config
        self._engine: tuple[str, PaperEngine] | None = None

    @property
    def answers(self) -> int:
        """Number of requests, without loading anything."""
        return sum(len(prompt.turns) for prompt in self.config.prompts)

    @cached_property
    def checkpoints(self) -> dict[str, Checkpoint]:
        """The models that draft for the target, by source."""
        return dict(draft_models(self.config.settings, self.config.model))

    @property
    def classifier(self) -> Path | None:
        """DISCO's: the one that is named, or that of the draft model's folder; None: there is none."""
        draft = self.checkpoints.get("draft_model")
        return self.config.classifier or (None if draft is None else classifier_of(draft.folder))

    def engine(self, streaming_form: str = "two_steps") -> PaperEngine:
        """The loaded target.

        Raises:
            ConfigurationError: it cannot be loaded.
        """
        settings = self.config.settings
        drafter = settings.drafter.model_copy(update={"streaming_form": streaming_form})
        return self._opened(streaming_form, settings.model_copy(update={"drafter": drafter}))

    def tuned_engine(self, shared: SharedStreams) -> PaperEngine:
        """The target with an adapter that requests may ask for, and the streams that were trained with it in its passes.

        Raises:
            ConfigurationError: it cannot be loaded.
        """
        return self._opened("shared", shared.settings(self.config.settings))

    def _opened(self, what: str, settings: Settings) -> PaperEngine:
        if self._engine is not None and self._engine[0] != what:
            self.close()
        if self._engine is None:
            self._engine = what, PaperEngine(settings, self.config.model)
        return self._engine[1]

    def row(
        self,
        *,
        name: str,
        label: str,
        paper: str,
        drafting: Callable[[], RowDrafting],
        temperature: float = 0.0,
        extra: Callable[[], Mapping[str, Any]] = dict,
        decoder: Callable[[], RowDecoder] | None = None,
    ) -> DecodedRow:
        """A row that is decoded over all prompts.

        Args:
            decoder: None: the engine.
        """
        return DecodedRow(
            name=name,
            label=label,
            paper=paper,
            decoder=decoder or self.engine,
            drafting=drafting,
            requests=lambda: self.requests,
            answers=self.answers,
            max_tokens=self.config.max_tokens,
            temperature=temperature,
            extra=extra,
        )

    @cached_property
    def requests(self) -> list[Request]:
        """The requests of all prompts; later turns follow the target's own answers.

        Raises:
            ConfigurationError: a prompt is too long; names it.
        """
        config, tokens = self.config, Tokens(str(self.config.model.path))
        made = make_requests(config.prompts, tokens, self._ask_plain, config.seed)
        for request in made:
            self._check_length(request)
        return made

    def close(self) -> None:
        """Release the target."""
        if self._engine is not None:
            self._engine[1].close()
            self._engine = None

    def _ask_plain(self, requests: Sequence[Request]) -> list[TimedAnswer]:
        return [TimedAnswer(tokens=self._plain(request), arrivals=()) for request in requests]

    def _plain(self, request: Request) -> tuple[int, ...]:
        self._check_length(request)
        params = SamplingParams(temperature=0, max_tokens=self.config.max_tokens, seed=request.seed)
        return self.engine().answer(request, params, plainly=True).tokens

    def _check_length(self, request: Request) -> None:
        most, wanted = self.engine().max_model_len, self.config.max_tokens
        if len(request.prompt) + wanted > most:
            raise ConfigurationError(
                f"prompt {request.id}: its {len(request.prompt)} tokens and --max-tokens {wanted} exceed {most}, the "
                "longest context here; leave it out, or lower --max-tokens",
                about=f"prompt {request.id}",
            )
