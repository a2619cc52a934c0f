"""Makes the policy that the settings name."""

from __future__ import annotations

from pathlib import Path

from services.drafter.config import StopConfig
from services.drafter.stopping.classifier import Disco, check_models, read_classifier
from services.drafter.stopping.confidence import Confidence
from services.drafter.stopping.entropy import Entropy
from services.drafter.stopping.interface import StopPolicy
from services.drafter.stopping.lengths import Heuristic, Static
from services.model_folder import model_fingerprint
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


def _disco(config: StopConfig, draft: Path, target: Path) -> Disco:
    if config.disco is None:
        raise ConfigurationError("stop_policy is disco: stop_classifier must name a file of `outrider train disco`")
    classifier, card = read_classifier(config.disco)
    check_models(card, config.disco, model_fingerprint(draft), model_fingerprint(target))
    return Disco(classifier, card.theta, card.max_tokens)
