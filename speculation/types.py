"""What the components exchange: stdlib only, frozen, no tensor and nothing as long as the vocabulary."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from speculation import limits
from speculation.errors import InvalidArgument
from speculation.records import quickly_made

AcceptanceRule = Literal["walk", "rejection"]
GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar"]
# What an answer tells of its drafts: nothing; for each token, who guessed it; and each pass's tree as well.
Report = Literal["none", "sources", "trees"]
# How much is drafted: as the strategy's paper has it, at every step; or what pays by measurement.
Effort = Literal["paper", "measured"]
DEFAULT_MAX_TOKENS = 256


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """The form that an answer must have, as vLLM names it.

    ``text``: a JSON schema, nothing (any JSON object), a regular expression, a JSON list of strings, or a Lark grammar.

    Raises:
        InvalidArgument: the text is too long.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > limits.MAX_GRAMMAR_CHARACTERS:
            allowed = f"at most {limits.MAX_GRAMMAR_CHARACTERS} characters"
            raise InvalidArgument(f"structured_outputs.{self.kind}", f"{len(self.text)} characters", allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the target chooses its tokens, under every strategy alike. It checks itself, whoever makes it or decodes it.

    ``ignore_generation_config``: the model's own logits processors are not applied (model_files/generation_config.py).
    ``prompt_logprobs``: as ``logprobs``, of the prompt's own tokens but its first.
    ``allowed_token_ids``: no other tokens are chosen; empty: all are. ``bad_words``: token ids that never follow each other.

    Raises:
        InvalidArgument: a value is outside its range; names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_generation_config: bool = False
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0:
            # Below the minimum, logits divided by the temperature overflow float32.
            _check_range("temperature", self.temperature, limits.MIN_TEMPERATURE, limits.MAX_TEMPERATURE, suffix=", or 0")
        _check_range("top_k", self.top_k, *limits.TOP_K)
        _check_range("top_p", self.top_p, *limits.TOP_P, above_low=True)
        _check_range("min_p", self.min_p, *limits.MIN_P)
        _check_range("seed", self.seed, 0, limits.MAX_UINT64)
        _check_range("max_tokens", self.max_tokens, 1, limits.MAX_TOKENS)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("repetition_penalty", self.repetition_penalty, *limits.REPETITION_PENALTY)
        _check_range("presence_penalty", self.presence_penalty, *limits.PRESENCE_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, *limits.FREQUENCY_PENALTY)
        _check_count("stop", self.stop, limits.MAX_STOP_STRINGS, "stop strings")
        for text in self.stop:
            if not 1 <= len(text) <= limits.MAX_STOP_CHARACTERS:
                raise InvalidArgument("stop", text, f"strings of 1 to {limits.MAX_STOP_CHARACTERS} characters")
        _check_count("stop_token_ids", self.stop_token_ids, limits.MAX_STOP_TOKENS, "token ids")
        _check_count("logit_bias", self.logit_bias, limits.MAX_LOGIT_BIAS, "entries")
        _check_count("bad_words", self.bad_words, limits.MAX_SPELLINGS, "words")
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, *limits.LOGIT_BIAS)
        _check_range("logprobs", self.logprobs or 0, 0, limits.MAX_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs or 0, 0, limits.MAX_LOGPROBS)


def _check_range(name: str, value: float, low: float, high: float, *, above_low: bool = False, suffix: str = "") -> None:
    if not (math.isfinite(value) and low <= value <= high and not (above_low and value == low)):
        # By the bounds: the value may be 3 where 3.5 would do as well.
        if isinstance(low, int) and isinstance(high, int):
            kind, least, most = "a whole number", f"{low}", f"{high}"
        else:
            kind, least, most = "a finite number", f"{low:.16g}", f"{high:.16g}"
        span = f"above {least}, at most {most}" if above_low else f"from {least} to {most}"
        raise InvalidArgument(name, value, f"{kind} {span}{suffix}")


def _check_count(name: str, values: tuple[object, ...] | Mapping[int, float], most: int, noun: str) -> None:
    if len(values) > most:
        raise InvalidArgument(name, f"{len(values)} {noun}", f"at most {most} {noun}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Defaults from a model's generation config, for fields that a request leaves open. None, or empty: no default.

    ``max_length`` and ``min_length`` count the prompt as well; ``max_tokens`` and ``min_tokens`` take precedence.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    max_length: int | None = None
    min_length: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A sparse draft distribution q over next tokens; tokens that are not listed have probability 0."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTree:
    """Token ids that may come next.

    Node ``i`` holds ``tokens[i]``; its parent is node ``parents[i] < i``, or the last committed token (-1). ``sources``
    names each node's source. ``scores`` (empty, or one per node) are the probabilities that sources claim for its path.
    ``probes`` are nodes that are computed but can never be accepted. ``proposals`` (empty, or one per node) are the draft
    distributions q that the tokens of a sampled draft were drawn from.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    probes: tuple[int, ...] = ()
    proposals: tuple[Proposal, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


EMPTY_TREE = TokenTree()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How one request is sped up.

    ``sources`` draft. A step checks at most ``max_nodes`` nodes, and accepts them by the rule ``acceptance``. It reports to
    the sources the ``observe_top_k`` likeliest ids per node (0: none), and the hidden states of ``observe_layers`` (see
    ``Features.layers``) at committed positions; with ``observe_prompt`` also those of the prompt. ``report_passes``: each
    step's ``Progress`` says what its pass checked. ``effort``: "paper": every step waits for a draft and checks
    all of it; "measured": as far as that pays.
    """

    strategy: str
    sources: tuple[str, ...] = ()
    max_nodes: int = 0
    acceptance: AcceptanceRule = "walk"
    observe_top_k: int = 0
    observe_layers: tuple[int, ...] = ()
    observe_prompt: bool = False
    report_passes: bool = False
    effort: Effort = "measured"

    @property
    def speculates(self) -> bool:
        """Whether any drafting is asked for."""
        return bool(self.sources) and self.max_nodes > 0

    @property
    def by_paper(self) -> bool:
        """Whether every step is drafted for, whatever that costs."""
        return self.speculates and self.effort == "paper"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probability (nats, of the unprocessed logits) of a committed token and of the likeliest ones."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class HeldNumbers(Protocol):
    """Rows of numbers that stay where they were made, such as on a GPU; ``bytes`` fetches them, ``len`` says how many."""

    def __len__(self) -> int: ...

    def __bytes__(self) -> bytes: ...

    def rows(self, begin: int, end: int) -> HeldNumbers:
        """Rows ``begin`` to before ``end``."""
        ...

    def columns(self, parts: Sequence[range]) -> HeldNumbers:
        """These numbers of each row, one part after the other."""
        ...

    def followed_by(self, others: Sequence[HeldNumbers]) -> HeldNumbers:
        """These rows and the others', which are of the same kind."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Hidden states, packed row-major little-endian: ``rows`` x ``width`` numbers of ``dtype``.

    Attributes:
        data: held elsewhere only within one process; links between processes carry bytes.
        dtype: "float32", "float16" or "bfloat16".
        start: position of the first row, counted from the start of the prompt; the others follow.
        layers: the decoder layers whose outputs are concatenated in a row; negative ones count from the end, except -1, the
            input of the output layer. From the number of layers on: what it reads of the row's streams; 0: not computed.
    """

    data: bytes | HeldNumbers
    rows: int
    width: int
    dtype: str
    start: int = 0
    layers: tuple[int, ...] = (-1,)

    def part(self, begin: int, end: int) -> Features:
        """Rows ``begin`` to before ``end``."""
        data, row = self.data, len(self.data) // self.rows
        own = data[begin * row : end * row] if isinstance(data, bytes) else data.rows(begin, end)
        return replace(self, data=own, rows=end - begin, start=self.start + begin)

    def of_layers(self, layers: Sequence[int]) -> Features:
        """The same rows of these of its layers, in this order."""
        if tuple(layers) == self.layers:
            return self
        size = self.width // len(self.layers)
        parts = [range(at * size, (at + 1) * size) for at in map(self.layers.index, layers)]
        data = self.data
        if isinstance(data, bytes):
            row = len(data) // self.rows
            unit = row // self.width
            data = b"".join(
                data[first + part.start * unit : first + part.stop * unit]
                for first in range(0, len(data), row)
                for part in parts
            )
        else:
            data = data.columns(parts)
        return replace(self, data=data, width=size * len(layers), layers=tuple(layers))

    def followed_by(self, others: Sequence[Features]) -> Features:
        """One with the rows of the ``others`` behind, which are those of the next positions."""
        if not others:
            return self
        data = self.data
        held = [other.data for other in others if not isinstance(other.data, bytes)]
        if isinstance(data, bytes) or len(held) < len(others):
            data = b"".join([bytes(data), *(bytes(other.data) for other in others)])
        else:
            data = data.followed_by(held)
        return replace(self, data=data, rows=self.rows + sum(other.rows for other in others))


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a forward pass showed beyond the verdict: free knowledge for drafters.

    ``top_ids[0]`` are the likeliest next tokens after the pending token, ``top_ids[i + 1]`` those after node ``i`` of
    ``tree``, and ``probe_ids[j]`` those after the tree's j-th probe. Empty if nobody asked. ``probe_chances[j]``: how likely
    each of these is after a row of noise, nothing after another probe; empty if no probe is noise.
    """

    tree: TokenTree = EMPTY_TREE
    top_ids: Sequence[tuple[int, ...]] = ()
    probe_ids: tuple[tuple[int, ...], ...] = ()
    probe_chances: tuple[tuple[float, ...], ...] = ()
    features: Features | None = None


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What one pass decided for one request.

    ``committed`` are the tokens of ``accepted_path``, then the bonus token. If generation ends inside the path, both are cut
    there. ``length`` counts prompt and answer.
    """

    accepted_path: tuple[int, ...]
    committed: tuple[int, ...]
    length: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    observation: Observation | None = None


@dataclass(kw_only=True, slots=True)
class SpeculationStats:
    """Running counts of one request, by vLLM's definitions.

    A step is one pass that committed tokens, with drafts or without. ``num_spec_tokens``: most tokens that one may draft.
    ``accepted_of_drafted``: steps by how many tokens they drafted, and how many of those were accepted.
    ``seconds_saved``: by which its tokens came sooner than by plain decoding of the same requests; negative: later.
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_committed_tokens: int = 0
    num_spec_tokens: int = 0
    accepted_of_drafted: dict[tuple[int, int], int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    switches: list[str] = field(default_factory=list)
    seconds_saved: float = 0.0

    def record(self, *, drafted: int, accepted_sources: tuple[str, ...], committed: int, seconds_saved: float = 0.0) -> None:
        """Count one step."""
        accepted = len(accepted_sources)
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        self.num_committed_tokens += committed
        self.seconds_saved += seconds_saved
        self.accepted_of_drafted[drafted, accepted] = self.accepted_of_drafted.get((drafted, accepted), 0) + 1
        for source in accepted_sources:
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1

    @property
    def acceptance_histogram(self) -> list[int]:
        """Entry i: steps in which exactly i drafted tokens were accepted, for every number that one may draft."""
        most = max((accepted for _, accepted in self.accepted_of_drafted), default=0)
        counts = [0] * (max(self.num_spec_tokens, most) + 1)
        for (_, accepted), steps in self.accepted_of_drafted.items():
            counts[accepted] += steps
        return counts

    @property
    def acceptance_histogram_by_draft_length(self) -> dict[int, list[int]]:
        """The same of the steps that drafted so many tokens, by that number; those without a draft are left out."""
        counts = {drafted: [0] * (drafted + 1) for drafted, _ in sorted(self.accepted_of_drafted) if drafted}
        for (drafted, accepted), steps in self.accepted_of_drafted.items():
            if drafted:
                counts[drafted][accepted] += steps
        return counts

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per pass (tau), the target's own token included."""
        return self.num_committed_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0
