"""jinja2's sandbox with limits on time and size: a chat template runs for seconds at most and makes megabytes of text at
most.

The sandbox keeps a template away from everything that is not its own, but it does not stop a template that loops for hours
or doubles a text forty times. Here every loop, call and sum checks the clock, and whatever makes texts longer checks the
length first.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Characters of a text, entries of a list; twice what a request can hold.
MOST = 8 << 20
MOST_SECONDS = 5.0
_MOST_BITS = 4096
# A width of a million or more in a format string.
_WIDE = re.compile(r"\d{7}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are rendered through ``limited``.

    Raises:
        SecurityError: a template exceeds a limit.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # lipsum makes text of any length.
        del self.globals["lipsum"]
        self.filters = {name: self._checked(made) for name, made in self.filters.items()}
        self._clock = threading.local()

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        """Add a filter for templates, with the same limits."""
        self.filters[name] = self._checked(made)

    def limited(self, render: Callable[[], str]) -> str:
        """The result of ``render``.

        Raises:
            SecurityError: ``render`` exceeds a limit; the time is ``MOST_SECONDS``.
        """
        self._clock.ends_at = time.monotonic() + MOST_SECONDS
        try:
            return render()
        finally:
            del self._clock.ends_at

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Check every call of a template."""
        self.look_at_clock()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            _check_numbers((*args, *kwargs.values()))
            _check_growth(owner, function.__name__, args)
        return _bounded(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check every operator in ``intercepted_binops``."""
        self.look_at_clock()
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * abs(right), _MOST_BITS)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_numbers(right if isinstance(right, tuple) else (right,))
        return _bounded(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Check every ``str.format``."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        _check_format(value.__self__)

        def formatted(*args: Any, **kwargs: Any) -> str:
            # Arguments can be widths.
            _check_numbers((*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return formatted

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        taken, length = [], 0
        for piece in pieces:
            length += len(piece)
            _check(length, MOST)
            taken.append(piece)
        return "".join(taken)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, with a look at the clock before each."""
        for item in items:
            self.look_at_clock()
            yield item

    def joined(self, *parts: Any) -> str:
        """The result of ``~``."""
        self.look_at_clock()
        return self.concat(map(str, parts))

    def look_at_clock(self) -> None:
        """Raises:
        SecurityError: the time of ``limited`` is over. Outside of ``limited`` there is no limit.
        """
        if time.monotonic() > getattr(self._clock, "ends_at", float("inf")):
            raise SecurityError(f"the chat template takes more than {MOST_SECONDS:g} seconds")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Guards().visit(tree)
        return tree

    def _checked(self, made: Callable[..., Any]) -> Callable[..., Any]:
        # jinja2 reads from a filter's attributes, which functools.wraps copies, whether it wants the context or environment.
        @functools.wraps(made)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.look_at_clock()
            # The filter's input follows the context or environment, if it gets one.
            owner, *rest = args[1:] if isinstance(args[0], (Context, Environment, nodes.EvalContext)) else args
            _check_numbers((*rest, *kwargs.values()))
            if isinstance(owner, str) and made.__name__ == "do_format":
                _check_format(owner)
            _check_growth(owner, made.__name__.removeprefix("do_"), rest)
            return _bounded(made(*args, **kwargs))

        return checked


class _Guards(NodeTransformer):
    """Routes loops and ``~`` through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # jinja2 finds it by this name
        self.generic_visit(node)
        node.iter = _asks("counted", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _asks("joined", node.nodes, node.lineno)


def _asks(name: str, arguments: Sequence[nodes.Node], line: int) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), [*arguments], [], None, None)
    call.set_lineno(line)
    return call


def _check(size: float, most: float) -> None:
    if size > most:
        raise SecurityError("the chat template makes a text, a list or a number that is too long")


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)):
        _check(len(value), MOST)
    return value


def _check_numbers(values: Iterable[Any]) -> None:
    """Check integers that may be widths or counts."""
    for value in values:
        if isinstance(value, int):
            _check(value, MOST)


def _check_format(text: str) -> None:
    _check(MOST + 1 if _WIDE.search(text) else 0, MOST)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check(left.bit_length() + right.bit_length(), _MOST_BITS)
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(count, int):
            _check(len(sequence) * count, MOST)


def _check_growth(owner: object, method: str, args: Sequence[Any]) -> None:
    """Check string methods and filters whose result may be as long as the product of their inputs."""
    if method == "replace" and isinstance(owner, str) and len(args) >= 2:
        times = len(owner) // max(1, len(str(args[0]))) + 1
        _check(len(owner) + times * len(str(args[1])), 2 * MOST)
    elif method == "join":
        # str.join joins its argument; the filter joins its input.
        between, parts = (owner, args[:1]) if isinstance(owner, str) else (args[0] if args else "", (owner,))
        for listed in parts:
            if isinstance(listed, (list, tuple)):
                _check(sum(len(str(part)) + len(str(between)) for part in listed), MOST)
