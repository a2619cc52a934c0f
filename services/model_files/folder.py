"""Reads a model's folder for every service. A fault in it becomes one line with its place and cause.

Folders come from anywhere, and libraries raise all kinds of exceptions with many lines for a damaged one. ``reading`` is the
one place that turns them into ``ConfigurationError``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from speculation.errors import ConfigurationError, OutriderError

log = logging.getLogger(__name__)

# First bytes of the pointer that git-lfs leaves in place of a file that was not fetched.
LFS = b"version https://git-lfs"
_LONGEST = 400
_LAST_SECOND = 253_402_300_799
_WEIGHTS = ("safetensors", "bin", "pt", "gguf")
# Bytes at either end of a weight file that tell it from others.
_END = 1 << 20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# The text of these exceptions is enough; for all others the class is shown, too.
_TELLING = (OSError, ValueError, RuntimeError, NotImplementedError)
_ALSO_TELLING = (
    "Exception",
    "SafetensorError",
    "StrictDataclassFieldValidationError",
    "StrictDataclassClassValidationError",
)


@contextmanager
def reading(what: str, about: object = "") -> Iterator[None]:
    """Wraps a block that reads a model's files.

    Args:
        what: the step, to follow "cannot": ``load the model at FOLDER``.
        about: the file or folder, the error's field.

    Raises:
        ConfigurationError: the block raised anything but an ``OutriderError``, which passes unchanged.
    """
    try:
        yield
    except OutriderError:
        raise
    except BaseException as error:
        # PanicException, which libraries written in Rust raise, is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        log.debug("cannot %s", what, exc_info=error)
        raise ConfigurationError(f"cannot {what}: {one_line(error, about)}", about=about) from error


def one_line(error: BaseException, named: object = "") -> str:
    """The message of an error on one line of at most 400 characters.

    Args:
        named: the file that the whole sentence names already, so that it need not be named again.
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None and str(error.filename) == str(named):
        return error.strerror
    text = " ".join(_COLOURS.sub("", str(error)).split())
    if not text:
        return type(error).__name__
    if not isinstance(error, _TELLING) and type(error).__name__ not in _ALSO_TELLING:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def read_json(file: Path, of: str = "model") -> dict[str, Any]:
    """The object in a JSON file of a model's folder.

    Args:
        of: what the file belongs to, for the error.

    Raises:
        ConfigurationError: the file cannot be read, or holds no JSON object; says why.
    """
    where = f"cannot load the {of} at {file.parent}: {file.name}"
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be read ({error.strerror or one_line(error)})", about=file) from error
    if data.startswith(LFS):
        raise ConfigurationError(
            f"{where} is a pointer of git-lfs: fetch the file with `git lfs pull` in its folder", about=file
        )
    if not data.strip():
        raise ConfigurationError(f"{where} cannot be read (it is empty)", about=file)
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} cannot be read ({one_line(error)})", about=file) from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{where} is no JSON object, but {_kind(content)}", about=file)
    return content


def _kind(value: object) -> str:
    """The kind of a JSON value, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "text" if isinstance(value, str) else "a number"


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of ``config.json``; all of it, if the model has no other part."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _digest_begun(folder: Path) -> tuple[hashlib._Hash, list[Path]]:
    """A hash of config.json, and the weight files that it goes on with."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigurationError(f"cannot read the model at {folder}: it has no .safetensors file", about=folder)
    return digest, files


def written_at(model: Path) -> int:
    """When a model's weights were written last, or its config.json where they lie elsewhere, in seconds since 1970.

    Args:
        model: its folder, or its file.

    Returns:
        0 where there is no such file, or it has no such time.
    """
    try:
        weights = [file for kind in _WEIGHTS for file in model.glob(f"*.{kind}")] if model.is_dir() else [model]
        newest = int(max(file.stat().st_mtime for file in weights or [model / "config.json"]))
    except OSError:
        return 0
    # What lies beyond the year 9999 is no date.
    return newest if 0 < newest <= _LAST_SECOND else 0


def model_fingerprint(folder: Path) -> str:
    """Tells models apart, in milliseconds: a hash of config.json and of the size and both ends of every weight file.

    Raises:
        ConfigurationError: a file cannot be read, or there are no weights.
    """
    with reading(f"read the model at {folder}", about=folder):
        digest, files = _digest_begun(folder)
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as content:
                digest.update(content.read(_END))
                content.seek(max(0, size - _END))
                digest.update(content.read(_END))
    return digest.hexdigest()


def weights_digest(folder: Path) -> str:
    """A hash of config.json and of every byte of the weight files: a second for each one or two gigabytes.

    Raises:
        ConfigurationError: a file cannot be read, or there are no weights.
    """
    with reading(f"read the model at {folder}", about=folder):
        digest, files = _digest_begun(folder)
        for file in files:
            with file.open("rb") as content:
                digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def check_vocabulary(folder: Path, largest: int) -> None:
    """Check that the model has an embedding for every token of the tokeniser's own vocabulary.

    Some models have no embedding for added tokens; a request that contains such a token is refused.

    Args:
        largest: largest id in the tokeniser's own vocabulary.

    Raises:
        ConfigurationError: the tokeniser belongs to another model.
    """
    file = folder / "config.json"
    if not file.is_file():
        return
    size = text_config(read_json(file)).get("vocab_size")
    if isinstance(size, int) and largest >= size:
        raise ConfigurationError(
            f"cannot load the tokeniser at {folder}: its tokens have ids up to {largest}, but vocab_size in config.json is "
            f"{size}: it is the tokeniser of another model",
            about=folder,
        )


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of the tokenizer's file, without the settings of truncation and padding, which do not change its token ids.

    Raises:
        ConfigurationError: tokenizer.json is missing or cannot be read.
    """
    file = folder / "tokenizer.json"
    try:
        found = file.stat()
        return _tokenizer_digest(file, found.st_mtime_ns, found.st_size)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read tokenizer.json ({one_line(error, file)})", field=folder) from error


def known_tokenizer(folder: Path) -> str:
    """``tokenizer_digest``; empty: there is no tokenizer.json that says."""
    try:
        return tokenizer_digest(folder)
    except ConfigurationError:
        return ""


@lru_cache(maxsize=8)
def _tokenizer_digest(file: Path, modified: int, size: int) -> str:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    content = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
