"""What calls return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """A token and its log-probability, in nats."""

    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """A token of a text with its log-probability (before temperature and the like), and the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[Logprob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOrigin:
    """Who guessed a token, "target" where nobody did, and how many characters it adds to the answer's text."""

    source: str
    text_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedNodes:
    """What drafters proposed for a pass and was not worth checking; fields as in ``PassReport``.

    As parents, the nodes are counted behind the checked ones: the first one is number ``len(PassReport.tokens)``.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """One pass of the target over the request, and the tree that it checked: the first five fields have one entry per node.

    Attributes:
        texts: each token's by itself; of one within a character U+FFFD.
        parents: an earlier node; -1: the token before the pass's.
        sources: who proposed the node.
        probabilities: what that source claims for the whole path to the node.
        accepted: the nodes whose tokens the answer has, in order.
        committed: tokens of the answer that the pass brought: those, and mostly one that the target chose after them.
        pass_s: seconds from the pass's beginning until its tokens were known.
        wait_s: seconds for which the pass waited for drafts before.
        requests: how many requests shared the pass.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    probabilities: tuple[float, ...]
    accepted: tuple[int, ...]
    committed: int
    dropped: DroppedNodes
    pass_s: float
    wait_s: float
    requests: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What one decoding step added. Text may lag behind tokens while a character or a possible stop string is incomplete.

    ``origins``: one for each token, with ``report``. The characters that it adds may come with a later chunk; those of a
    stop string are counted, and never come. ``passes``: those that the tokens come from, with ``report="trees"``.
    ``prompt_logprobs``: of the prompt's tokens but its first, with ``prompt_logprobs``, before or with the first token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    origins: tuple[TokenOrigin, ...] = ()
    passes: tuple[PassReport, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts; ``cached_tokens`` of the prompt had been computed for an earlier request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeDecoding:
    """How the answer was sped up; the names are vLLM's, plus ``strategy`` and five of the last six.

    ``mean_acceptance_length`` is tokens per step, the target's own included. ``num_spec_tokens``: most drafted tokens that a
    step may have. ``acceptance_histogram[i]`` counts the steps in which exactly ``i`` drafted tokens were accepted,
    ``accepted_by_source`` those that each source proposed. ``switches`` says which sources of the strategy were left out,
    after how many tokens, and why. ``seconds_saved``: by which the answer came sooner than by plain decoding in the same
    company; negative: later; 0 where the server does not measure it.
    ``rule`` is the server's rule that chose how to draft; empty: none did.
    ``learnt``: why the server chose the strategy by what it has learnt of such requests; empty: it did not choose.
    """

    strategy: str
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: tuple[int, ...]
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    seconds_saved: float = 0.0
    rule: str = ""
    learnt: str = ""
    num_spec_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds, measured at the server."""

    queue_s: float
    time_to_first_token_s: float
    total_s: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What an answer would have taken under another strategy: alone, with no memory of earlier requests. None: not known.

    Attributes:
        num_passes: as ``SpeculativeDecoding.num_spec_steps``.
        seconds: of all passes behind the prompt's and of their drafts, by the server's measured costs.
        exact: the replay told its drafters all that passes would; otherwise they may have taken somewhat fewer passes.
        without: sources of the strategy that were left out, since they run a model or read hidden states.
    """

    strategy: str
    num_passes: int | None
    tokens_per_pass: float | None
    seconds: float | None
    exact: bool
    without: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A whole answer. ``finish_reason`` is "stop" or "length"; ``stop`` is the stop string or stop token that ended it.

    ``request_id`` is what the request is called in the server's logs. ``arithmetic`` is a short hash that differs where the
    server's weights, dtype or kernels could give other tokens. ``origins``: one for each token, with ``report``;
    their characters, one token's after the other's, are exactly the text. ``passes``: all of them, with
    ``report="trees"``. ``comparisons``: one for each strategy in ``compare``. ``prompt_logprobs``: of the prompt's tokens
    but its first, with ``prompt_logprobs``.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    stop: str | int | None
    usage: Usage
    speculative_decoding: SpeculativeDecoding
    timing: Timing
    prompt_token_ids: tuple[int, ...]
    seed: int
    model: str
    request_id: str
    arithmetic: str = ""
    origins: tuple[TokenOrigin, ...] = ()
    passes: tuple[PassReport, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reloaded:
    """Weights that have taken the place of others. ``arithmetic``: that of the answers from now on; see ``Generation``.
    ``notes``: what whoever has replaced them should know."""

    arithmetic: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NameableDrafter:
    """A model that drafts, which requests may name (``drafter=``); ``strategy``: the one that drafts with it alone."""

    name: str
    strategy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedWeights:
    """Which numbers a served model has: of all models that a checkpoint may stand for, answers are exact for this one.

    ``stored``: how its files store them; empty: not known. ``multiplied``: as what linear layers multiply by them, such as
    Q4_0 or float32; that of most of them first. ``kernels``: what multiplies; ``native`` is Outrider's own.
    ``rounded_inputs``: how layers round what enters them; ``rounded_cache``: how keys and values are when they are stored;
    empty: they are not.
    """

    stored: str = ""
    multiplied: tuple[str, ...] = ()
    kernels: str = ""
    rounded_inputs: str = ""
    rounded_cache: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A served model.

    ``defaults``: what requests get that leave an option open, from the model's generation_config.json (``max_length`` and
    ``min_length`` count the prompt as well). ``processors``: what else that file does to logits, value by name, as JSON.
    A request that says ``ignore_generation_config`` gets neither. ``bit_exact``: a token's logits were seen to be the same
    bits whatever shares its pass; otherwise answers are the same up to near ties. ``adapters``: names under which requests
    ask for the model with a LoRA adapter. ``strategies`` and ``drafters``: those that requests with this API key may name.
    ``created``: when the files were written that the service started with, in seconds since 1970; 0: not known.
    """

    name: str
    max_model_len: int
    vocab_size: int
    strategies: tuple[str, ...]
    default_strategy: str
    bit_exact: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)
    processors: Mapping[str, str] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    drafters: tuple[NameableDrafter, ...] = ()
    weights: ServedWeights = ServedWeights()
    created: int = 0
