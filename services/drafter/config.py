"""Settings of a drafter: one small class per source. A ``Setting`` gives the name under which users may set a field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from services.settings import Setting
from speculation.errors import ConfigurationError
from speculation.sources import AUTO, WHERE_TRAINED

# Settings that SPECTRA and lookahead share.
_NGRAM = Setting(name="spectra_ngram", ge=2, le=16, about="N of spectra and lookahead: length of n-grams")
_WINDOW = Setting(name="spectra_window", ge=0, le=64, about="W: columns of their candidate window")
_GUESSES = Setting(name="spectra_guesses", ge=1, le=64, about="G: continuations kept for a token")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupConfig:
    """Prompt lookup; the names are vLLM's.

    Attributes:
        prompt_lookup_max: longest n-gram that is looked up.
        prompt_lookup_min: shortest.
        max_branches: most earlier occurrences that are followed at once.
    """

    prompt_lookup_max: Annotated[int, Setting(name="prompt_lookup_max", ge=1, le=64)] = 4
    prompt_lookup_min: Annotated[int, Setting(name="prompt_lookup_min", ge=1, le=64)] = 1
    max_branches: Annotated[int, Setting(name="prompt_lookup_branches", ge=1, le=64)] = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """Suffix decoding; names as vLLM's where it has them.

    Attributes:
        depth: longest n-gram that is counted, in tokens.
        max_endings: most suffixes of the text, of different lengths, that are followed at once.
        max_tokens: latest tokens of a request's own text in which its suffixes are looked up.
        max_cached_tokens: tokens of earlier answers kept for each tenant; 0: a request learns from itself alone, and no
            answer is kept.
        cached_s: seconds after which an earlier answer is forgotten.
        max_tenants: most tenants whose answers are kept; the one unused longest is forgotten first.
    """

    depth: int = 16
    max_endings: int = 4
    max_tokens: Annotated[
        int,
        Setting(
            name="suffix_max_tokens",
            ge=256,
            le=1 << 20,
            about="latest tokens of a request's own text in which `suffix` looks for its endings; about 150 bytes each",
        ),
    ] = 65_536
    max_cached_tokens: Annotated[
        int,
        Setting(
            name="suffix_cached_tokens",
            ge=0,
            le=10_000_000,
            about="tokens of earlier answers that `suffix` keeps for each API key, for its own requests alone; 0: none",
        ),
    ] = 0
    cached_s: Annotated[
        float, Setting(name="suffix_cached_s", gt=0, about="seconds after which such an answer is forgotten")
    ] = 3600.0
    max_tenants: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    """Token recycling.

    Attributes:
        max_tenants: most tenants whose tables are kept; the one unused longest is forgotten first.
        max_entries: most entries of a table; the one learnt longest ago is dropped first.
        snapshot: file of successors that every table begins with, or None.
    """

    max_tenants: int = 64
    max_entries: int = 50_000
    snapshot: Annotated[
        Path | None,
        Setting(
            name="recycling_snapshot",
            about="file of successors that recycling begins with; None: the one of retrieval.index, if there is one",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AnpdConfig:
    """ANPD.

    Attributes:
        max_order: longest n-gram that is counted, its last token included.
    """

    max_order: Annotated[int, Setting(name="anpd_max_order", ge=2, le=16, about="longest n-gram that anpd counts")] = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadConfig:
    """Lookahead decoding.

    Attributes:
        ngram: N, length of the n-grams that the window yields.
        window: W, number of its columns.
        guesses: G, most n-grams that are kept for a token and checked at once.
    """

    ngram: Annotated[int, _NGRAM] = 5
    window: Annotated[int, _WINDOW] = 15
    guesses: Annotated[int, _GUESSES] = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class SpectraConfig:
    """SPECTRA.

    Attributes:
        ngram: N, length of the n-grams that are entered into the dictionaries.
        window: W, number of columns of the candidate window; 0: no window.
        guesses: G, most continuations that are kept for a token and checked at once.
        explore_prob: probability that a column takes a token that the forward dictionary does not know yet.
        forward, backward, sub_ngrams: parts that the paper's ablation (Table 2) switches off, one at a time.
    """

    ngram: Annotated[int, _NGRAM] = 5
    window: Annotated[int, _WINDOW] = 15
    guesses: Annotated[int, _GUESSES] = 15
    explore_prob: Annotated[
        float,
        Setting(name="spectra_explore_prob", ge=0, le=1, about="how often the window takes a token that is not known yet"),
    ] = 0.1
    forward: Annotated[
        bool, Setting(name="spectra_forward", about="spectra's forward dictionary; off: the paper's ablation")
    ] = True
    backward: Annotated[bool, Setting(name="spectra_backward", about="its backward dictionary")] = True
    sub_ngrams: Annotated[bool, Setting(name="spectra_sub_ngrams", about="enter sub-n-grams as well")] = True


StopName = Literal["static", "heuristic", "heuristic_transient", "confidence", "entropy", "disco"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig:
    """When a draft model's chain ends; the names are Hugging Face's where it has them.

    Attributes:
        policy: ``static``: always ``num_assistant_tokens``. ``heuristic``, ``heuristic_transient``: two more after a step
            that accepted all, else one less; kept from request to request, or not. ``confidence``: stops after a token less
            likely than a threshold, which is fitted again after every step. ``entropy``: stops after a token from a
            distribution of high entropy (SVIP). ``disco``: stops by a trained classifier.
        num_assistant_tokens: length of a draft; of a request's first draft under the heuristics; the most under the others.
            A classifier has a most of its own, which holds under ``disco``.
        assistant_confidence_threshold: of ``confidence``: where the fit begins.
        entropy_threshold: of ``entropy``: stops where sqrt(0.15 * entropy), a bound of the rejection probability, is above.
        disco: classifier of ``disco``, a .safetensors file beside a .json file of the same name.
    """

    policy: Annotated[StopName, Setting(name="stop_policy", about="when a draft model's chain ends")] = "static"
    num_assistant_tokens: Annotated[
        int,
        Setting(name="num_assistant_tokens", ge=1, le=512, about="tokens of a draft model's chain; the most if it may stop"),
    ] = 5
    assistant_confidence_threshold: Annotated[
        float,
        Setting(
            name="assistant_confidence_threshold",
            ge=0,
            le=1,
            about="stop_policy: confidence: stops after less likely tokens",
        ),
    ] = 0.4
    entropy_threshold: Annotated[
        float, Setting(name="stop_entropy", ge=0, about="stop_policy: entropy: stops where sqrt(0.15 * entropy) is above")
    ] = 0.3
    disco: Annotated[
        Path | None, Setting(name="stop_classifier", about="stop_policy: disco: .safetensors of `outrider train disco`")
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
        device: of their weights and caches, as torch names it.
        dtype: of their weights and sums.
        num_steps: most levels of a tree; None: as many as pay.
        eagle_topk: most branches of a node; None: as many as pay.
        num_draft_tokens: size of EAGLE-2's own tree, with its root; None: the likeliest paths, as many as pay.
        medusa_choices: the fixed tree of Medusa's heads; None: the likeliest paths.
        window: the latest committed positions that a drafter of hidden states attends to.
        stop: when a draft model's chain ends.
        draft_kernels: computes the draft model in a folder, for the target in another one, by the target's own kernels, over
            the given tokens' output rows (None: all); refuses with a ConfigurationError what these do not compute. None:
            torch computes it.
    """

    checkpoints: Mapping[str, Path] = field(default_factory=dict)
    asked_for: bool = True
    default_strategy: str = AUTO
    target: Path | None = None
    device: Annotated[str, Setting(name="device", about="where draft models compute: cpu, cuda, cuda:1")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Setting(name="dtype", about="numbers that draft models compute with")
    ] = "float32"
    num_steps: Annotated[
        int | None, Setting(name="speculative_num_steps", ge=1, le=64, about="most levels of a draft model's tree")
    ] = None
    eagle_topk: Annotated[
        int | None, Setting(name="speculative_eagle_topk", ge=1, le=64, about="most branches of a node of its tree")
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        Setting(
            name="speculative_num_draft_tokens",
            ge=2,
            le=512,
            about="grow EAGLE-2's own tree, of this size with its root; for heads",
        ),
    ] = None
    medusa_choices: Annotated[
        Choices | None,
        Setting(name="medusa_choices", about="grow Medusa's fixed tree, as many of its 63 nodes as pay; for Medusa's heads"),
    ] = None
    window: Annotated[
        int, Setting(name="draft_window", ge=16, about="latest positions that a drafter of hidden states attends to")
    ] = 2048
    stop: StopConfig = field(default_factory=StopConfig)
    # It gives a LanguageModel, whose module needs torch, which settings do without.
    draft_kernels: Callable[[Path, Path, Sequence[int] | None], Any] | None = None

    @property
    def at_start(self) -> tuple[str, ...]:
        """The sources whose models are loaded at start: all that somebody named; of those that come along, the one that a
        blend uses, and that of the default strategy. The others are loaded when a request first names them."""
        if self.asked_for:
            return tuple(self.checkpoints)
        blended = [name for name in WHERE_TRAINED[AUTO] if name in self.checkpoints][:1]
        return tuple(name for name in self.checkpoints if name in (*blended, self.default_strategy))

    def weights_of(self, source: str) -> tuple[Path, Path]:
        """The folders of the source's weights and of the target.

        Raises:
            ConfigurationError: one of them is not named.
        """
        folder = self.checkpoints.get(source)
        if folder is None:
            raise ConfigurationError(f"drafter.models names no weights of {source}: must name their folder")
        if self.target is None:
            raise ConfigurationError("trained.target is None: must name the folder of the target that is drafted for")
        return folder, self.target


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A drafter.

    Attributes:
        max_sessions: most open sessions; the one unused longest is dropped first.
        calibration: file for the weights learnt about sources, or None; it holds no text.
        retrieval_deadline_s: longest that a draft waits for the retrieval index.
        draft_ahead: number of a step's likeliest outcomes for which the next draft is sent in advance.
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
    max_sessions: Annotated[int, Setting(name="max_sessions", ge=1)] = 1024
    calibration: Path | None = None
    retrieval_deadline_s: Annotated[
        float, Setting(name="retrieval_deadline_s", ge=0, le=1, about="longest that a draft waits for the index")
    ] = 0.01
    draft_ahead: Annotated[
        int,
        Setting(
            name="draft_ahead",
            ge=0,
            le=8,
            about="likely outcomes of a step for which the next draft is sent in advance; pays on slow links",
        ),
    ] = 0
    max_feature_bytes: int = 1 << 30
