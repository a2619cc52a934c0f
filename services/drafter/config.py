"""Settings of a drafter: one small class per source. A ``Setting`` gives the name under which users may set a field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from services.settings import Setting
from speculation.errors import ConfigurationError
from speculation.sources import AUTO, blended

# Settings that SPECTRA and lookahead share.
_NGRAM = Setting("N of spectra and lookahead: length of the n-grams that they keep", name="spectra_ngram", ge=2, le=16)
_WINDOW = Setting(
    "W of spectra and lookahead: columns of their candidate window; 0: no window",
    name="spectra_window",
    ge=0,
    le=64,
)
_GUESSES = Setting(
    "G of spectra and lookahead: most continuations that are kept for a token and verified at once",
    name="spectra_guesses",
    ge=1,
    le=64,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupConfig:
    """Prompt lookup; the names are vLLM's."""

    prompt_lookup_max: Annotated[
        int, Setting("longest n-gram that prompt lookup looks for in prompt and answer", ge=1, le=64)
    ] = 4
    prompt_lookup_min: Annotated[
        int, Setting("shortest n-gram that prompt lookup looks for; at most prompt_lookup_max", ge=1, le=64)
    ] = 1
    max_branches: Annotated[
        int,
        Setting("most earlier occurrences that prompt lookup follows at once", name="prompt_lookup_branches", ge=1, le=64),
    ] = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """Suffix decoding; names as vLLM's where it has them.

    Attributes:
        depth: longest n-gram that is counted, in tokens.
        max_endings: most suffixes of the text, of different lengths, that are followed at once.
        max_tenants: most tenants whose answers are kept; the one unused longest is forgotten first.
    """

    depth: int = 16
    max_endings: int = 4
    max_tokens: Annotated[
        int,
        Setting(
            "latest tokens of a request's own text in which suffix decoding looks for its endings; about 150 bytes each",
            name="suffix_max_tokens",
            ge=256,
            le=1 << 20,
        ),
    ] = 65_536
    max_cached_tokens: Annotated[
        int,
        Setting(
            "tokens of earlier answers that suffix decoding keeps in memory for each API key, for its own requests alone; "
            "0: none",
            name="suffix_cached_tokens",
            ge=0,
            le=10_000_000,
        ),
    ] = 0
    cached_s: Annotated[
        float, Setting("seconds after which an answer of suffix_cached_tokens is forgotten", name="suffix_cached_s", gt=0)
    ] = 3600.0
    max_tenants: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    """Token recycling.

    Attributes:
        max_tenants: most tenants whose tables are kept; the one unused longest is forgotten first.
        max_entries: most entries of a table; the one learnt longest ago is dropped first.
    """

    max_tenants: int = 64
    max_entries: int = 50_000
    snapshot: Annotated[
        Path | None,
        Setting(
            "file of successors that token recycling begins with; null: the one of retrieval.index, if there is one",
            name="recycling_snapshot",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AnpdConfig:
    """ANPD."""

    max_order: Annotated[
        int, Setting("longest n-gram that anpd counts, its last token included", name="anpd_max_order", ge=2, le=16)
    ] = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadConfig:
    """Lookahead decoding, in the paper's letters: N, W and G."""

    ngram: Annotated[int, _NGRAM] = 5
    window: Annotated[int, _WINDOW] = 15
    guesses: Annotated[int, _GUESSES] = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class SpectraConfig:
    """SPECTRA. The paper's ablation (Table 2) switches ``forward``, ``backward`` and ``sub_ngrams`` off, one at a time.

    Attributes:
        label_guesses: nodes name where their guess comes from (``sources.spectra.LABELS``) instead of the source: figure 3.
    """

    ngram: Annotated[int, _NGRAM] = 5
    window: Annotated[int, _WINDOW] = 15
    guesses: Annotated[int, _GUESSES] = 15
    explore_prob: Annotated[
        float,
        Setting(
            "probability that a column of spectra's window takes a token that the forward dictionary does not know yet",
            name="spectra_explore_prob",
            ge=0,
            le=1,
        ),
    ] = 0.1
    forward: Annotated[bool, Setting("whether spectra uses its forward dictionary", name="spectra_forward")] = True
    backward: Annotated[bool, Setting("whether spectra uses its backward dictionary", name="spectra_backward")] = True
    sub_ngrams: Annotated[
        bool, Setting("whether spectra enters sub-n-grams into its dictionaries as well", name="spectra_sub_ngrams")
    ] = True
    label_guesses: bool = False


StopName = Literal["static", "heuristic", "heuristic_transient", "confidence", "entropy", "disco"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig:
    """When a draft model's chain ends; the names are Hugging Face's where it has them.

    Attributes:
        policy: ``static``: always ``num_assistant_tokens``. ``heuristic``, ``heuristic_transient``: two more after a step
            that accepted all, else one less; kept from request to request, or not. ``confidence``: stops after a token less
            likely than a threshold, which is fitted again after every step. ``entropy``: stops after a token from a
            distribution of high entropy (SVIP). ``disco``: stops by a trained classifier.
    """

    policy: Annotated[
        StopName,
        Setting(
            "when a draft model's chain ends: after num_assistant_tokens, as earlier drafts were accepted (heuristic), or "
            "after a token in doubt (confidence, entropy, disco)",
            name="stop_policy",
        ),
    ] = "static"
    # A classifier has a most of its own, which holds under ``disco``.
    num_assistant_tokens: Annotated[
        int,
        Setting(
            "tokens of a draft model's chain; of a request's first one under the heuristics, the most under the others that "
            "stop",
            ge=1,
            le=512,
        ),
    ] = 5
    assistant_confidence_threshold: Annotated[
        float,
        Setting(
            "under stop_policy: confidence, a chain ends after a token less likely than this, which is fitted after every "
            "step",
            ge=0,
            le=1,
        ),
    ] = 0.4
    entropy_threshold: Annotated[
        float,
        Setting(
            "under stop_policy: entropy, a chain ends where sqrt(0.15 * entropy), a bound of the rejection probability, is "
            "above",
            name="stop_entropy",
            ge=0,
        ),
    ] = 0.3
    disco: Annotated[
        Path | None,
        Setting(
            "under stop_policy: disco, the classifier: the .safetensors file of `outrider train disco`, with its .json "
            "beside; null: the one in the draft model's own folder, disco/classifier.safetensors",
            name="stop_classifier",
        ),
    ] = None


# TensorRT-LLM's word for the fixed tree of Medusa's heads, and its authors' name of their tree.
Choices = Literal["mc_sim_7b_63"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedConfig:
    """Sources that run a model of their own. Names as SGLang's where it has them.

    Attributes:
        checkpoints: the folder of each one's weights, by the source's name.
        asked_for: whether somebody named these weights. Useless ones are then refused; others only warned of.
        default_strategy: of requests that name none.
        target: the target's folder: configuration, weights and tokenizer; None if there are no such sources.
        stop: when a draft model's chain ends.
        captures: the kernels that the settings name, with which a head on a GPU whose passes cannot be captured is refused,
            unless it hands on more than keys and values; empty: they are launched.
        draft_kernels: computes the draft model in a folder, for the target in another one, by the target's own kernels, over
            the given tokens' output rows (None: all); refuses with a ConfigurationError what these do not compute. None:
            torch computes it.
        linear_kernels: for heads: gives what makes a linear layer of a weight and a bias by the target's own kernels (None:
            this machine has none). None: torch multiplies.
    """

    checkpoints: Mapping[str, Path] = field(default_factory=dict)
    asked_for: bool = True
    default_strategy: str = AUTO
    target: Path | None = None
    device: Annotated[str, Setting("where draft models compute, as torch names it: cpu, cuda, cuda:1")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "int8"],
        Setting(
            "numbers that models that draft hold and compute with; on a CPU, our kernels multiply by weights as their files "
            "store them (float32), or rounded to eight bits (int8)"
        ),
    ] = "float32"
    num_steps: Annotated[
        int | None,
        Setting("most levels of a draft model's tree; null: as many as pay", name="speculative_num_steps", ge=1, le=64),
    ] = None
    eagle_topk: Annotated[
        int | None,
        Setting(
            "most branches of a node of a draft model's tree; null: as many as pay",
            name="speculative_eagle_topk",
            ge=1,
            le=64,
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        Setting(
            "for heads: size of EAGLE-2's own tree, with its root; null: the likeliest paths, as many as pay",
            name="speculative_num_draft_tokens",
            ge=2,
            le=512,
        ),
    ] = None
    medusa_choices: Annotated[
        Choices | None,
        Setting("for Medusa's heads: their fixed tree, as many of its 63 nodes as pay; null: the likeliest paths"),
    ] = None
    uno_branches: Annotated[
        int,
        Setting(
            "for Uno's adapter: most nodes of a draft that have noise behind them in the pass that checks it; 0: passes "
            "that draft and passes that check take turns, as its authors have it",
            ge=0,
            le=8,
        ),
    ] = 0
    window: Annotated[
        int,
        Setting(
            "latest positions that a head attends to; no more than its own max_position_embeddings",
            name="draft_window",
            ge=16,
        ),
    ] = 2048
    stop: StopConfig = field(default_factory=StopConfig)
    captures: str = ""
    # It gives a LanguageModel, whose module needs torch, which settings do without.
    draft_kernels: Callable[[Path, Path, Sequence[int] | None], Any] | None = None
    linear_kernels: Callable[[], Callable[[Any, Any], Any] | None] | None = None

    @property
    def held_dtype(self) -> str:
        """Torch's name of the numbers that modules are loaded in, before weights are rounded."""
        return "float32" if self.dtype == "int8" else self.dtype

    @property
    def at_start(self) -> tuple[str, ...]:
        """The sources whose models are loaded at start: all that somebody named; of those that come along, the one that a
        blend uses, and that of the default strategy. The others are loaded when a request first names them."""
        if self.asked_for:
            return tuple(self.checkpoints)
        wanted = (*blended(self.checkpoints, named=False), self.default_strategy)
        return tuple(name for name in self.checkpoints if name in wanted)

    def weights_of(self, source: str) -> tuple[Path, Path]:
        """The folders of the source's weights and of the target.

        Raises:
            ConfigurationError: one of them is not named.
        """
        folder = self.checkpoints.get(source)
        if folder is None:
            raise ConfigurationError(
                "must name their folder", field="drafter.models", verb="names", value=f"no weights of {source}"
            )
        if self.target is None:
            raise ConfigurationError(
                "must name the folder of the target that is drafted for", field="trained.target", value=None
            )
        return folder, self.target


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A drafter.

    Attributes:
        calibration: file for the weights learnt about sources, or None; it holds no text.
        max_feature_bytes: most bytes of hidden states kept for sources that read them, over all sessions; the oldest of the
            largest session are dropped first.
    """

    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    recycling: RecyclingConfig = field(default_factory=RecyclingConfig)
    anpd: AnpdConfig = field(default_factory=AnpdConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    spectra: SpectraConfig = field(default_factory=SpectraConfig)
    trained: TrainedConfig = field(default_factory=TrainedConfig)
    max_sessions: Annotated[
        int, Setting("most requests whose text a drafter holds; the one unused longest is dropped first", ge=1)
    ] = 1024
    calibration: Path | None = None
    retrieval_deadline_s: Annotated[
        float, Setting("longest that a draft waits for the retrieval index, in seconds", ge=0, le=1)
    ] = 0.01
    draft_ahead: Annotated[
        int,
        Setting(
            "most outcomes of a step, the likeliest, for which text sources and models that draft "
            "send the next draft in advance, as far as these come true; pays on slow links",
            ge=0,
            le=8,
        ),
    ] = 0
    max_feature_bytes: int = 1 << 30
