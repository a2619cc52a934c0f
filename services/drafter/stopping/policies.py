"""Makes the policy that the settings name."""

from __future__ import annotations

from pathlib import Path

from services.drafter.config import StopConfig
from services.drafter.stopping.classifier import Disco, check_models, read_classifier
from services.drafter.stopping.confidence import Confidence
from services.drafter.stopping.entropy import Entropy
from services.drafter.stopping.interface import StopPolicy
from services.drafter.stopping.lengths import Heuristic, Static
from services.model_files.folder import model_fingerprint
from speculation.errors import ConfigurationError


def make_stop(config: StopConfig, draft: Path, target: Path) -> StopPolicy:
    """The policy for a draft model.

    Args:
        draft, target: folders of the two models, for which a classifier must have been made.

    Raises:
        ConfigurationError: the classifier is missing, damaged, or was made for other models.
    """
    length = config.num_assistant_tokens
    match config.policy:
        case "static":
            return Static(length)
        case "heuristic" | "heuristic_transient":
            return Heuristic(length, transient=config.policy == "heuristic_transient")
        case "confidence":
            return Confidence(length, config.assistant_confidence_threshold)
        case "entropy":
            return Entropy(length, config.entropy_threshold)
        case "disco":
            return _disco(config, draft, target)


def check_stop(config: StopConfig) -> None:
    """Check a policy's settings, without the models that it is for.

    Raises:
        ConfigurationError: the classifier is missing, unreadable, or not asked for by the policy.
    """
    if config.policy == "disco":
        read_classifier(_file_of(config))
    elif config.disco is not None:
        raise ConfigurationError(
            field="drafter.stop_classifier",
            value=config.disco,
            given=f"but drafter.stop_policy is {config.policy}",
            allowed="unset, or stop_policy disco",
        )


def _file_of(config: StopConfig) -> Path:
    if config.disco is None:
        raise ConfigurationError(
            "drafter.stop_classifier must name a file of `outrider train disco`", field="drafter.stop_policy", value="disco"
        )
    return config.disco


def _disco(config: StopConfig, draft: Path, target: Path) -> Disco:
    file = _file_of(config)
    classifier, card = read_classifier(file)
    check_models(card, file, model_fingerprint(draft), model_fingerprint(target))
    return Disco(classifier, card.theta, card.max_tokens)
