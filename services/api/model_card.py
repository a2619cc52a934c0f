"""A served model, as users see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from speculation.messages import ServedWeights
from speculation.types import SamplingDefaults


@dataclass(frozen=True, kw_only=True, slots=True)
class NameableDrafter:
    """A model that drafts, as requests may name it; ``strategy``: the one that drafts with it alone."""

    name: str
    strategy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """A served model, as users see it.

    Attributes:
        defaults: sampling values for requests that leave them unset.
        processors: further processing of the model's logits, as (name, value).
        bit_exact: a check at start found a token's logits to be the same bits whatever shares its pass. Otherwise answers
            are the same except where two tokens nearly tie.
        arithmetic: a short hash that differs where weights, dtype or kernels could give other tokens.
        chats: there is a chat template.
        tool_format: how the chat template has the model write calls of tools, a name in ``services.tool_formats``; empty: it
            does not say, or not in a form that is read.
        thoughts: how the model marks what it thinks before it answers, a name in ``services.tool_formats.catalogue``; empty:
            it does not, or thoughts are to stay in the text.
        reads_thoughts: the chat template shows the model its earlier thoughts.
        named_roles: whose messages the chat template shows with names.
        special_tokens: tokens that have no text, by their names; added_tokens: all that are marks, with text or without.
        late_system: its chat templates take messages of the role system behind other ones.
        template_options: what else its chat templates read, by name.
        aliases: other names of the model.
        infills: its tokenizer has the tokens that mark a gap to be filled.
        adapters: the arithmetic of answers that are computed with each of its LoRA adapters, by the adapter's name, which
            requests name as their model.
        weights: which numbers the model has, so which model answers are exact for.
        created: when the files were written that the service started with, in seconds since 1970; 0: that is not known.
        strategies, drafters: those that requests of the tenant that asks may name.
    """

    name: str
    max_model_len: int
    vocab_size: int
    strategies: tuple[str, ...]
    default_strategy: str
    bit_exact: bool
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    processors: tuple[tuple[str, str], ...] = ()
    arithmetic: str = ""
    chats: bool = True
    tool_format: str = ""
    thoughts: str = ""
    reads_thoughts: bool = False
    named_roles: tuple[str, ...] = ()
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    late_system: bool = True
    template_options: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    infills: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    drafters: tuple[NameableDrafter, ...] = ()
    weights: ServedWeights = field(default_factory=ServedWeights)
    created: int = 0
