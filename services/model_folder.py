"""A model's folder, as every service reads it: whatever is wrong with it becomes one line, which says where and what.

Folders come from anywhere, and what libraries raise of a damaged one is anything, many lines of it. ``reading`` is the one
place where that becomes ``ConfigurationError``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculation.errors import ConfigurationError, OutriderError

log = logging.getLogger(__name__)

# How the pointers begin that git-lfs leaves where it has not fetched the file.
LFS = b"version https://git-lfs"
_LONGEST = 400
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Their text alone says what is wrong; of the others the class is half of it.
_TELLING = (OSError, ValueError, RuntimeError, NotImplementedError)
_ALSO_TELLING = (
    "Exception",
    "SafetensorError",
    "StrictDataclassFieldValidationError",
    "StrictDataclassClassValidationError",
)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """For a block that makes something of a model's files.

    Args:
        what: the step, to follow "cannot": ``load the model at FOLDER``.

    Raises:
        ConfigurationError: whatever the block raised, but for errors that were raised on purpose.
    """
    try:
        yield
    except OutriderError:
        raise
    except BaseException as error:
        # Libraries written in Rust panic with an exception of their own, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        log.debug("cannot %s", what, exc_info=error)
        raise ConfigurationError(f"cannot {what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an error says, on one line of at most some 400 characters."""
    text = " ".join(_COLOURS.sub("", str(error)).split())
    if not text:
        return type(error).__name__
    if not isinstance(error, _TELLING) and type(error).__name__ not in _ALSO_TELLING:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def read_json(file: Path, of: str = "model") -> dict[str, Any]:
    """The object in a JSON file of a model's folder.

    Args:
        of: what the file is a part of, for the error.

    Raises:
        ConfigurationError: there is none; says why.
    """
    where = f"cannot load the {of} at {file.parent}: {file.name}"
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be read ({error.strerror or one_line(error)})") from error
    if data.startswith(LFS):
        raise ConfigurationError(f"{where} is a pointer of git-lfs: fetch the file with `git lfs pull` in its folder")
    if not data.strip():
        raise ConfigurationError(f"{where} cannot be read (it is empty)")
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} cannot be read ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{where} is no JSON object, but {_kind(content)}")
    return content


def _kind(value: object) -> str:
    """A JSON value's kind in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "text" if isinstance(value, str) else "a number"


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of ``config.json``: the whole of it, where the model is nothing else."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def check_vocabulary(folder: Path, largest: int) -> None:
    """Check that the model has an embedding of every ordinary token. (Of tokens that were added, some models have none:
    such a token is refused with the request that holds it.)

    Args:
        largest: id of the tokeniser's own vocabulary.

    Raises:
        ConfigurationError: the tokeniser is another model's.
    """
    file = folder / "config.json"
    if not file.is_file():
        return
    size = text_config(read_json(file)).get("vocab_size")
    if isinstance(size, int) and largest >= size:
        raise ConfigurationError(
            f"cannot load the tokeniser at {folder}: its tokens have ids up to {largest}, but vocab_size in config.json is "
            f"{size}: it is the tokeniser of another model"
        )
