"""Renders a model's chat template as transformers does, without transformers.

Templates come with models from elsewhere and are foreign programs. They run in jinja2's sandbox, limited in time and length.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from services.router.template_bounds import BoundedEnvironment

# Marks the end of a message that is to be continued; its space shows whether the template trims messages.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# A text that no template holds.
_MARKER = "Outrider7marker"


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source, as models carry it.
        tokens: special tokens that the template may use, by name, such as bos_token.

    Raises:
        jinja2.TemplateSyntaxError: the source is not a valid template.

    Attributes:
        variables: names that the template reads and does not define, except those of special tokens and functions.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
            found = meta.find_undeclared_variables(self._environment.parse(source))
        except jinja2.TemplateError:
            raise
        except Exception as error:  # jinja2 compiles to Python, whose compiler may fail, too
            raise jinja2.TemplateSyntaxError(_said_by(error), 1) from error
        self._tokens = dict(tokens)
        self._source = source
        self.variables = frozenset(found - {*tokens, *self._environment.globals})

    def reads(self, name: str) -> bool:
        """Whether the template may read a variable, or a message's field, of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as text, up to the point where the assistant's answer begins.

        Args:
            options: variables for the template; without ``add_generation_prompt``, that is True.
            continue_final_message: end within the last message, as transformers does.

        Raises:
            jinja2.TemplateError: the template rejects the conversation, fails on it, or does what the sandbox forbids.
        """
        shown = [dict(message) for message in messages]
        if continue_final_message:
            shown[-1]["content"] += _TAG
        if self.reads_parts:
            for message in shown:
                message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        return self._written(shown, options, continue_final_message=continue_final_message)

    @functools.cached_property
    def reads_parts(self) -> bool:
        """Whether it reads a message's content as a list of parts, and shows nothing of a text."""

        def shows(content: object) -> bool:
            try:
                text = self._written([{"role": "user", "content": content}], None)
            except jinja2.TemplateError:
                return False
            # A list that is written as it is has not been read.
            return _MARKER in text and f"'{_MARKER}'" not in text

        return not shows(_MARKER) and shows([{"type": "text", "text": _MARKER}])

    def _written(
        self,
        shown: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
        *,
        continue_final_message: bool = False,
    ) -> str:
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self._tokens, **(options or {})}
        try:
            text = self._environment.limited(lambda: self._template.render({**given, "messages": list(shown)}))
            return _before_tag(text) if continue_final_message else text
        except jinja2.TemplateError:
            raise
        except Exception as error:  # a template is a program: it may divide by zero, or call itself for ever
            raise jinja2.TemplateRuntimeError(_said_by(error)) from error


def _before_tag(text: str) -> str:
    """The text up to the end of the message that was tagged."""
    at = text.rfind(_TAG.strip())
    if at < 0:
        raise jinja2.TemplateError("it does not show the end of the last message, which can so not be continued")
    # A template that trims messages has taken the tag's space, and would have taken the message's own.
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


def _said_by(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
    environment.add_filter("tojson", _to_json)
    environment.globals.update(
        {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _PublicNamespace}
    )
    return environment


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only outputs its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # transformers makes it a call block, too, which has a scope of its own.
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> Any:
        return caller()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, this one does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """``dict`` without the attributes of a class, through which a template could leave the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _PublicNamespace(Namespace):
    """A namespace that rejects names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=...)` works, as in jinja2
        self, rest = args[0], args[1:]
        given = dict(*rest, **kwargs)
        for name in given:
            _check_public(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store {name!r} in a namespace")
