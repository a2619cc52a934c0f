"""One colour for each source of tokens, wherever they are shown: on the terminal, on the page, in reports.

All are equally light (OKLCH, L 0.6), so that each can be read on white and on black (contrast of 3.6 at least). The
sources of one strategy have hues far from each other. Heads that read the target's hidden states are of one kind, and
their hues may be near each other.
"""

from __future__ import annotations

from speculation.sources import AUTO, GRAMMAR, STRATEGIES, TARGET, kind_of

# By source: sRGB, as in HTML.
COLOURS: dict[str, str] = {
    TARGET: "#808080",
    "suffix": "#059a46",
    "recycling": "#bb6802",
    "prompt_lookup": "#2a80e2",
    "retrieval": "#9860d0",
    "semantic": "#796ce0",
    "prediction": "#c34e97",
    "anpd": "#009298",
    "lookahead": "#928103",
    "spectra_core": "#5f9205",
    "spectra": "#7e8900",
    "draft_model": "#ce4a72",
    "eagle": "#cf5604",
    "eagle3": "#d25030",
    "fspad": "#d24c49",
    "streaming": "#098db2",
    "medusa": "#b156b7",
    "mtp": "#d14a5f",
    "peagle": "#2e8f7a",
    "dflash": "#bd5087",
    "uno": "#3a86c8",
    GRAMMAR: "#038fa6",
}
# Strategies of several sources are nobody's colour; the others have their source's.
_OF_SEVERAL = {"blend": "#4f8266", AUTO: "#92705a"}


def colour_of(name: str) -> str:
    """The colour of a source or a strategy; grey for what drafts nothing or is unknown.

    >>> colour_of("suffix"), colour_of("rest") == colour_of("retrieval"), colour_of("autoregressive") == colour_of("target")
    ('#059a46', True, True)
    """
    if name in _OF_SEVERAL:
        return _OF_SEVERAL[name]
    (source, *_) = STRATEGIES.get(name) or (name,)
    return COLOURS.get(kind_of(source), COLOURS[TARGET])
