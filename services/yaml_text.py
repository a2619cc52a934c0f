"""Reads YAML that people have written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml


def read_yaml(text: str) -> Any:
    """What a text of one document says, in YAML's plain kinds.

    Raises:
        ValueError: it says nothing that can be read; the message is one line.
    """
    with _in_one_line():
        return yaml.safe_load(text)


def read_documents(text: str) -> list[Any]:
    """The same of each document.

    Raises:
        ValueError: as ``read_yaml``.
    """
    with _in_one_line():
        return [*yaml.safe_load_all(text)]


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:
        # PyYAML raises whatever it stumbles over: no value is looked at before it is made, such as the date 2024-13-45.
        raise ValueError(f"a value is not what it looks like ({type(error).__name__}: {error})") from error
