"""What each source of drafts needs, and which sources a strategy uses. Router, drafter and verifier all read it here.

A new source is one entry here, and one file and one line of ``catalogue.py`` in ``services/drafter/sources``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """A source of drafts.

    Attributes:
        kind: ``text`` drafts from tokens in under a millisecond; ``model`` runs a model.
        nodes: default for the most drafted nodes per step; trees with branches need more than chains.
        top_k: how many of the likeliest next tokens it wants reported after every verified node.
        layers: hidden states that it wants, see ``Features.layers``; of a model, the usual ones, and its weights say which.
        prompt_features: whether it wants those of the prompt's positions, too.
        retrieval: whether it uses a retrieval index; with ``layers``, one that holds hidden states.
        samples: whether it draws its nodes from a known draft distribution q, as ``acceptance: rejection`` needs.
    """

    name: str
    kind: Literal["text", "model"] = "text"
    nodes: int = 32
    top_k: int = 0
    layers: tuple[int, ...] = ()
    prompt_features: bool = False
    retrieval: bool = False
    samples: bool = False


# The group of the drafts of all sources that run no model.
TEXT = "text"


def _model(name: str, *, nodes: int = 32, layers: tuple[int, ...] = ()) -> SourceSpec:
    return SourceSpec(name=name, kind="model", nodes=nodes, layers=layers, prompt_features=bool(layers), samples=True)


_SPECS = (
    SourceSpec(name="autoregressive", nodes=0),
    SourceSpec(name="prompt_lookup", nodes=8),
    SourceSpec(name="prediction"),
    SourceSpec(name="suffix", nodes=16),
    SourceSpec(name="recycling", top_k=8),
    SourceSpec(name="anpd", nodes=8),
    SourceSpec(name="lookahead", nodes=120, top_k=1),
    SourceSpec(name="spectra_core", nodes=120, top_k=8),
    SourceSpec(name="spectra", nodes=120, top_k=8, retrieval=True),
    SourceSpec(name="retrieval", retrieval=True),
    SourceSpec(name="semantic", layers=(-1,), retrieval=True),
    _model("draft_model", nodes=8),
    _model("eagle", layers=(-1,)),
    _model("eagle3", layers=(1, -16, -4)),
    _model("fspad", layers=(-1,)),
    _model("streaming", layers=(-7,)),
    _model("medusa", layers=(-1,)),
    _model("mtp", layers=(-1,)),
    _model("peagle", layers=(1, -16, -4)),
    _model("dflash", layers=(1, 8, 14, 21, -3)),
    SourceSpec(name="uno", kind="model", top_k=8),
)
# Stands where a source's name would, for a token that nobody guessed: the target chose it, and no accepted draft held it.
TARGET = "target"
# And for one that the verifier drafts itself, since a grammar allows no other.
GRAMMAR = "grammar"
SOURCES: dict[str, SourceSpec] = {spec.name: spec for spec in _SPECS}
# Between the name of a source that runs a model and that of the model, where users have named it: "fspad@code".
_NAMED = "@"

# Users name a strategy, a set of sources; plain decoding is the empty one. ``auto`` leaves out what does not pay.
AUTO, BLEND, _BLEND = "auto", "blend", ("suffix", "recycling")
STRATEGIES: dict[str, tuple[str, ...]] = {
    "autoregressive": (),
    **{name: (name,) for name in ("prompt_lookup", "suffix", "recycling")},
    **dict.fromkeys(("blend", AUTO), _BLEND),
    **{name: (name,) for name in ("anpd", "lookahead", "spectra_core", "spectra")},
    **dict.fromkeys(("spectra_retrieval", "rest"), ("retrieval",)),
    **{name: (name,) for name in ("semantic", "draft_model", "eagle", "eagle3", "fspad", "streaming", "medusa", "mtp")},
    **{name: (name,) for name in ("peagle", "dflash", "uno")},
}
# Strategies that draft as far as that pays; the others draft as their papers do, unless a request says otherwise.
MEASURED = (AUTO, "blend", "autoregressive")
# Sources that a strategy uses as well, on servers with a retrieval index that suits them.
WHERE_INDEXED: dict[str, tuple[str, ...]] = dict.fromkeys(("blend", AUTO), ("retrieval", "semantic"))
# The source that a strategy uses as well, and first, where a request has a prediction of its answer.
WHERE_PREDICTED: dict[str, str] = dict.fromkeys(("blend", AUTO), "prediction")
# Sources that draft from other answers: the tenant's, and those of its requests that have the same group.
FROM_ANSWERS = frozenset({"suffix"})
# Sources that run a model, which a strategy uses as well where the server has them.
_TRAINED = ("dflash", "peagle", "fspad", "eagle3", "eagle", "draft_model", "streaming", "medusa", "mtp", "uno")
WHERE_TRAINED: dict[str, tuple[str, ...]] = dict.fromkeys(("blend", AUTO), _TRAINED)
# What a list of sources may name: strategies of one source, and sources, each with the source that it means. What drafts
# from a request's prediction joins by itself.
LISTED: dict[str, str] = {
    **{strategy: own[0] for strategy, own in STRATEGIES.items() if len(own) == 1},
    **{name: name for name in SOURCES if name not in ("autoregressive", "prediction")},
}
# Nodes per step of strategies whose paper uses larger trees than the source's default.
STRATEGY_NODES: dict[str, int] = {"rest": 64}


def source_of(kind: str, model: str) -> str:
    """What plans and drafts call a source that runs a model which users have named; ``kind`` is in ``SOURCES``."""
    return f"{kind}{_NAMED}{model}"


def kind_of(source: str) -> str:
    """The name in ``SOURCES`` of a source."""
    return source.partition(_NAMED)[0]


def spec_of(source: str) -> SourceSpec | None:
    """What a source needs; None: there is no such source."""
    return SOURCES.get(kind_of(source))


def runs_model(source: str) -> bool:
    """Whether a source runs a model."""
    spec = spec_of(source)
    return spec is not None and spec.kind == "model"


def draft_groups(sources: Iterable[str]) -> tuple[str, ...]:
    """The groups in which a drafter sends drafts of sources (``Draft.group``): one for all texts, and one for each model.

    Example:
        >>> draft_groups(("suffix", "eagle3", "recycling"))
        ('eagle3', 'text')
    """
    names = tuple(sources)
    models = tuple(name for name in names if runs_model(name))
    return models if len(models) == len(names) else (*models, TEXT)


def blended(trained: Collection[str], *, named: bool) -> tuple[str, ...]:
    """Those of the sources with weights that ``auto`` and ``blend`` use, in their order.

    Args:
        trained: the sources that have weights here.
        named: whether somebody named these weights: then all, since each is asked only while it pays. Of those that come
            along it is the first: the others would be loaded and tried although nobody wants them.
    """
    found = tuple(source for kind in WHERE_TRAINED[AUTO] for source in trained if kind_of(source) == kind)
    return found if named else found[:1]
