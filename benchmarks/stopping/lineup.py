"""Who takes part in the comparison of stopping policies, and the best static length, found on prompts of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.bench.prompts import make_requests
from benchmarks.bench.records import Prompt, Request, TimedAnswer
from benchmarks.stopping.run import PLAIN, ChainDecoder, ChainRun, StopContestant
from cluster.models.drafters import by_kernels
from services.drafter.config import DrafterConfig, StopConfig, TrainedConfig
from services.drafter.draft_model.source import NAME, make
from services.drafter.stopping.classifier import Disco, check_models, read_classifier
from services.drafter.stopping.confidence import Confidence
from services.drafter.stopping.entropy import Entropy
from services.drafter.stopping.interface import StopPolicy
from services.drafter.stopping.lengths import Heuristic, Static
from services.model_files.folder import model_fingerprint
from services.router.tokens import Tokens
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from speculation.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppingConfig:
    """What to compare.

    Attributes:
        draft: folder of the draft model.
        classifier: file of ``outrider train disco``; None: disco takes no part.
        sweep: static lengths from 1 to this are tried for the best one.
        longest: most tokens of any draft, the oracle's included.
        tuning: prompts for the sweep; None: every second one of ``prompts``.
    """

    target: TargetConfig
    draft: Path
    classifier: Path | None
    stop: StopConfig
    params: SamplingParams
    sweep: int
    longest: int
    seed: int
    prompts: Sequence[Prompt]
    tuning: Sequence[Prompt] | None


class StoppingBench:
    """The models, the requests and the contestants.

    Raises:
        ConfigurationError: a model, a prompt or the classifier cannot be used; says why.
    """

    def __init__(self, config: StoppingConfig) -> None:
        self._config = config
        target_folder = Path(config.target.model_path)
        self._disco = None if config.classifier is None else _disco(config.classifier, config.draft, target_folder)
        trained = TrainedConfig(
            checkpoints={NAME: config.draft},
            target=target_folder,
            device=config.target.device,
            # The chain alone: siblings would cost rows and tell nothing about when to stop.
            eagle_topk=1,
            draft_kernels=by_kernels,
        )
        drafts = make(DrafterConfig(trained=trained))
        self.target = TransformersTarget(config.target)
        self.decoder = ChainDecoder(self.target, drafts.with_stop, NAME, config.params, config.longest)
        tokens = Tokens(config.target.model_path)
        every = self._requests(config.prompts, tokens)
        if config.tuning is None:
            self.tuning, self.requests = every[::2], every[1::2]
        else:
            self.tuning, self.requests = self._requests(config.tuning, tokens), every
        if not (self.tuning and self.requests):
            raise ConfigurationError(
                "two prompts are needed, one of them for the sweep", field="--prompts", verb="", value="too few"
            )

    def static_lengths(self, advance: Callable[[], None]) -> list[ChainRun]:
        """Answers to the prompts for tuning under every static length, by turns."""
        return self._by_turns(
            [StopContestant(name=PLAIN, make=None), *map(static, range(1, self._config.sweep + 1))], advance
        )

    def _by_turns(self, every: Sequence[StopContestant], advance: Callable[[], None]) -> list[ChainRun]:
        """The contestants' answers to the prompts for tuning."""
        sources = [self.decoder.source(each.make() if each.make else None) for each in every]
        runs = []
        for number, request in enumerate(self.tuning):
            for each in range(len(every)):
                at = (each + number) % len(every)
                runs.append(self.decoder.answer(request, sources[at], every[at]))
                advance()
        return runs

    def tune_theta(self, thetas: Sequence[float], advance: Callable[[], None]) -> float:
        """Give DISCO the threshold that answers the prompts for tuning in the fewest seconds, by turns; returns it."""
        assert self._disco is not None, "there is no classifier"
        tried = {theta: self._disco.with_theta(theta) for theta in thetas}
        runs = self._by_turns([_keeping(str(theta), policy) for theta, policy in tried.items()], advance)
        best = min(thetas, key=lambda theta: sum(run.seconds for run in runs if run.contestant == str(theta)))
        self._disco = tried[best]
        return best

    def contestants(self, best: int) -> list[StopContestant]:
        """All policies; ``best`` is the static length that the sweep found."""
        stop, disco = self._config.stop, self._disco
        first, most = stop.num_assistant_tokens, self._config.longest
        statics = [static(first)] if first == best else [static(first), static(best, "SL-opt")]
        found = [
            *statics,
            StopContestant(name="heuristic", make=lambda: Heuristic(first, transient=False)),
            StopContestant(name="heuristic_transient", make=lambda: Heuristic(first, transient=True)),
            StopContestant(
                name="confidence",
                make=lambda: Confidence(most, stop.assistant_confidence_threshold),
                score=lambda drafted: drafted.probability,
            ),
            StopContestant(
                name="entropy",
                make=lambda: Entropy(most, stop.entropy_threshold),
                score=lambda drafted: -drafted.entropy,
            ),
        ]
        if disco is not None:
            found.append(StopContestant(name="disco", make=lambda: disco, score=disco.confidence))
        return found

    def _requests(self, prompts: Sequence[Prompt], tokens: Tokens) -> list[Request]:
        return make_requests(prompts, tokens, self._ask_plain, self._config.seed)

    def _ask_plain(self, requests: Sequence[Request]) -> list[TimedAnswer]:
        plain = StopContestant(name=PLAIN, make=None)
        return [TimedAnswer(tokens=self.decoder.answer(each, None, plain).tokens, arrivals=()) for each in requests]


def _keeping(name: str, policy: StopPolicy) -> StopContestant:
    """A policy that does not learn as a contestant."""
    return StopContestant(name=name, make=lambda: policy)


def static(length: int, note: str = "") -> StopContestant:
    """A static length as a contestant."""
    return StopContestant(name=f"static {length}{' ' if note else ''}{note}", make=lambda: Static(length))


def fastest_length(runs: Sequence[ChainRun]) -> int:
    """The static length that answered the same requests in the fewest seconds."""
    seconds: dict[str, float] = {}
    for run in runs:
        if run.contestant != PLAIN:
            seconds[run.contestant] = seconds.get(run.contestant, 0.0) + run.seconds
    return int(min(seconds, key=lambda name: seconds[name]).removeprefix("static "))


def with_room(target: TargetConfig, longest: int) -> TargetConfig:
    """One request at a time, without reuse of earlier prompts: every contestant reads them anew."""
    return replace(target, enable_prefix_caching=False, kv_cache_tokens=max(longest, 2048))


def _disco(file: Path, draft: Path, target: Path) -> Disco:
    classifier, card = read_classifier(file)
    check_models(card, file, model_fingerprint(draft), model_fingerprint(target))
    return Disco(classifier, card.theta, card.max_tokens)
