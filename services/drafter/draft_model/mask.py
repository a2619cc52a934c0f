"""PARD's mask token: what makes a language model guess several tokens in one pass; read without torch.

An & al., PARD, 2504.18583: a draft model is trained with masks behind the text, of which each guesses the token behind its
own position. The mask is a token of its own vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.model_files.folder import text_config
from speculation.errors import ConfigurationError


def mask_of(config: Mapping[str, Any], where: str) -> int | None:
    """The mask token that a draft model's config.json names; None: it guesses one token at a time.

    Args:
        where: the model, for errors.

    Raises:
        ConfigurationError: it is no token of the model's.
    """
    token = config.get("pard_token")
    if token is None:
        return None
    # Models of pictures and text have their sizes one level deeper.
    size = text_config(dict(config)).get("vocab_size")
    if type(token) is not int or type(size) is not int or not 0 <= token < size:
        raise ConfigurationError(
            place=f"cannot load the draft model at {where}",
            field="pard_token",
            value=token,
            allowed=f"a token of the model, below its vocab_size, {size}",
        )
    return token
