"""The models that a drafter holds, as it announces them: what each is called, and for whom it drafts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from speculation.sources import SOURCES, source_of

# With the kind of the model before it, it must fit into a source's name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
# What a refusal says is allowed.
NAME = "1 to 40 of the characters A-Z a-z 0-9 . _ -, beginning with a letter or digit, and no source's name"
OTHER_NAME = "a name that no other model has"


def is_name(name: object) -> bool:
    """Whether a model that drafts may be called so."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and name not in SOURCES


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldModel:
    """A model that a drafter holds.

    Attributes:
        kind: the source that runs it; in ``SOURCES``.
        name: what its operator calls it; empty: as its kind.
        layers: the layers whose hidden states it reads, see ``Features.layers``.
        tenants: those that may use it; none: all may.
        when: what must hold of requests that it drafts for although they do not name it: conditions of a rule, as a JSON
            object; empty: nothing.
        blended: whether ``auto`` and ``blend`` use it for requests that name no drafter.
    """

    kind: str
    name: str = ""
    layers: tuple[int, ...] = ()
    tenants: tuple[str, ...] = ()
    when: str = ""
    blended: bool = True

    @property
    def called(self) -> str:
        """What users call it."""
        return self.name or self.kind

    @property
    def source(self) -> str:
        """What plans and drafts call it."""
        return source_of(self.kind, self.name) if self.name else self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterCard:
    """What a drafter tells of itself.

    Attributes:
        held: its models, each called by another name.
        target: what its operator calls the target that they were made for.
        tokenizer: digest of that target's tokenizer; empty: not known.
        version: of Outrider.
    """

    held: tuple[HeldModel, ...] = ()
    target: str = ""
    tokenizer: str = ""
    version: str = ""
