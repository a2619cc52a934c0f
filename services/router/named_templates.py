"""A model's chat templates by name, and its special tokens, read from the files of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.model_files.folder import reading
from services.router.templates import ChatTemplate
from speculation.errors import InvalidArgument

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
# Settings that hold special tokens by names of their own.
_NAMED = ("extra_special_tokens", "model_specific_special_tokens")


class ChatTemplates:
    """The templates that conversations are rendered with: as transformers chooses, ``tool_use`` where tools are given.

    Args:
        sources: Jinja sources by name; one that has no name is ``default``.
        tokens: special tokens that a template may use, by name.

    Raises:
        jinja2.TemplateSyntaxError: a source is not a valid template.

    Attributes:
        tokens: as given.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        used = {name: sources[name] for name in (_DEFAULT, _WITH_TOOLS) if name in sources}
        self._known = {name: ChatTemplate(source, tokens) for name, source in used.items()}
        self._names = tuple(sorted(sources))
        self.tokens = dict(tokens)

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def default(self) -> ChatTemplate | None:
        """The template of conversations without tools; None: there is none."""
        return self._known.get(_DEFAULT)

    @property
    def with_tools(self) -> ChatTemplate | None:
        """The template of conversations with tools; None: there is none."""
        return self._known.get(_WITH_TOOLS, self.default)

    @property
    def used(self) -> tuple[ChatTemplate, ...]:
        """All that conversations may be rendered with."""
        return tuple(self._known.values())

    def of(self, *, tools: bool) -> ChatTemplate:
        """The template of a conversation.

        Raises:
            InvalidArgument: there is none.
        """
        found = self.with_tools if tools else self.default
        if found is not None:
            return found
        why = "has no chat template"
        if self._names:
            why = f"has chat templates of the names {', '.join(self._names)}, but none called {_DEFAULT}"
        raise InvalidArgument("messages", "a conversation", f"a prompt or token ids: this model {why}")


def template_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The sources of a folder's chat templates by name; files of their own take precedence over the settings.

    Raises:
        ConfigurationError: a file cannot be read; names it.
    """
    files = {_DEFAULT: folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if files:
        return {name: _content(file) for name, file in files.items()}
    given = settings.get("chat_template")
    if isinstance(given, str):
        return {_DEFAULT: given}
    listed = given if isinstance(given, list) else []
    named = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, dict)}
    return {str(name): source for name, source in named.items() if isinstance(source, str)}


def _content(file: Path) -> str:
    with reading(f"read the chat template {file}", about=file):
        return file.read_text(encoding="utf-8")


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json that transformers gives to templates, by name."""
    found = {key: text_of(value) for key, value in settings.items() if key.endswith("_token")}
    for key in _NAMED:
        given = settings.get(key)
        if isinstance(given, dict):
            found |= {str(name): text_of(value) for name, value in given.items()}
    return {name: text for name, text in found.items() if text is not None}


def text_of(token: object) -> str | None:
    """The text of a token in the settings, where it is a string or an ``AddedToken`` object; None: neither."""
    if isinstance(token, dict):
        token = token.get("content") if token.get("__type") == "AddedToken" else None
    return token if isinstance(token, str) else None
