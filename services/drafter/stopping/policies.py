"""Makes the policy that the settings name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from services.drafter.config import StopConfig
from services.drafter.stopping.classifier import Disco, check_models, read_classifier
from services.drafter.stopping.confidence import Confidence
from services.drafter.stopping.entropy import Entropy
from services.drafter.stopping.interface import StopPolicy
from services.drafter.stopping.lengths import Heuristic, Static
from services.model_files.folder import model_fingerprint
from speculation.errors import ConfigurationError

# In the draft model's folder, but not beside its weights, whose fingerprint it names.
_COMES_ALONG = Path("disco", "classifier.safetensors")


def classifier_of(draft: Path) -> Path | None:
    """The classifier in the folder of a draft model; None: it has none."""
    file = draft / _COMES_ALONG
    return file if file.is_file() else None


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


def check_stop(config: StopConfig, drafts: Iterable[Path]) -> None:
    """Check a policy's settings; the models that it is for are not read.

    Args:
        drafts: folders of the draft models.

    Raises:
        ConfigurationError: the classifier is missing, unreadable, or not asked for by the policy.
    """
    if config.policy == "disco":
        for file in [_file_of(config, draft) for draft in drafts] or [_named(config)]:
            read_classifier(file)
    elif config.disco is not None:
        raise ConfigurationError(
            field="drafter.stop_classifier",
            value=config.disco,
            given=f"but drafter.stop_policy is {config.policy}",
            allowed="unset, or stop_policy disco",
        )


def _file_of(config: StopConfig, draft: Path) -> Path:
    """The classifier that the settings name, or the draft model's own."""
    own = classifier_of(draft) if config.disco is None else None
    return _named(config) if own is None else own


def _named(config: StopConfig) -> Path:
    if config.disco is None:
        raise ConfigurationError(
            "drafter.stop_classifier must name a file of `outrider train disco`", field="drafter.stop_policy", value="disco"
        )
    return config.disco


def _disco(config: StopConfig, draft: Path, target: Path) -> Disco:
    file = _file_of(config, draft)
    classifier, card = read_classifier(file)
    check_models(card, file, model_fingerprint(draft), model_fingerprint(target))
    return Disco(classifier, card.theta, card.max_tokens)
