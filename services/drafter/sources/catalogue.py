"""Makes sources by name. ``speculation.sources`` says what each needs of a pass."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import replace

from services.drafter.config import DrafterConfig
from services.drafter.sources.interfaces import ModelSource, TextSource
from services.model_files.folder import reading
from speculation.errors import InvalidArgument
from speculation.sources import SOURCES, kind_of

# "module:function", the module seen from ``_WITHIN``; imported only when the source is needed: some need torch.
_WITHIN = "services.drafter"
MAKERS: dict[str, str] = {
    "autoregressive": ".sources.autoregressive:make",
    "prompt_lookup": ".sources.prompt_lookup:make",
    "prediction": ".sources.prediction:make",
    "suffix": ".sources.suffix:make",
    "recycling": ".sources.recycling:make",
    "anpd": ".sources.anpd:make",
    "lookahead": ".sources.lookahead:make",
    "spectra_core": ".sources.spectra:make_core",
    "spectra": ".sources.spectra:make_full",
    "retrieval": ".sources.retrieval:make",
    "semantic": ".sources.semantic:make",
    "draft_model": ".draft_model.source:make",
    "eagle": ".heads.eagle.source:make_eagle",
    "eagle3": ".heads.eagle.source:make_eagle3",
    "fspad": ".heads.eagle.source:make_fspad",
    "streaming": ".heads.streams.source:make",
    "medusa": ".heads.medusa.source:make",
    "mtp": ".heads.mtp.source:make",
    "peagle": ".heads.eagle.parallel:make",
    "dflash": ".heads.blocks.source:make",
    "uno": ".heads.uno.source:make",
}


def make_source(name: str, config: DrafterConfig) -> TextSource | ModelSource:
    """A new source of a name that ``check_names`` accepts.

    Raises:
        ConfigurationError: a file that it needs cannot be read.
    """
    kind, trained = kind_of(name), config.trained
    if kind != name:
        # The makers know one model of each kind.
        config = replace(config, trained=replace(trained, checkpoints={kind: trained.checkpoints[name]}))
    module, _, function = MAKERS[kind].partition(":")
    make: Callable[[DrafterConfig], TextSource | ModelSource] = getattr(importlib.import_module(module, _WITHIN), function)
    if (folder := config.trained.checkpoints.get(kind)) is None:
        return make(config)
    with reading(f"load the drafter at {folder}", about=folder):
        return make(config)


def check_names(names: Iterable[str], config: DrafterConfig) -> None:
    """Check source names.

    Raises:
        InvalidArgument: a drafter has no such source, or no model of that name; lists the sources that exist.
    """
    for name in names:
        if name not in SOURCES and name not in config.trained.checkpoints:
            raise InvalidArgument("sources", name, "one of " + ", ".join(sorted(SOURCES)))
