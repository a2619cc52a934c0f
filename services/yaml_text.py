"""Reads YAML that people have written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

# What PyYAML quotes of a text in its errors, but for single characters and its own names, such as '<stream end>'. A text
# may hold secrets.
_QUOTED = re.compile(r""" (['"])(?!<)(?:(?!\1).){3,}\1""")


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
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context or "not YAML"
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        # The cause would show the lines in a traceback.
        raise ValueError(_QUOTED.sub("", " ".join(problem.split())) + place) from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:
        # PyYAML raises whatever it stumbles over: no value is looked at before it is made, such as the date 2024-13-45.
        raise ValueError(f"a value is not what it looks like ({type(error).__name__}: {error})") from error
