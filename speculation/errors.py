"""Every error that Outrider raises on purpose. Their gRPC statuses and HTTP codes are in ``services/statuses.py``."""

from __future__ import annotations

import reprlib
from itertools import islice

from typing_extensions import override

_SHOWN = 80


class _Beginning(reprlib.Repr):
    """As ``repr``, as far as errors show it: of a list of millions nobody writes all."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxtuple = self.maxlist = self.maxset = self.maxfrozenset = self.maxdict = _SHOWN
        self.maxstring = self.maxlong = self.maxother = 4 * _SHOWN

    @override
    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """In the dictionary's own order, unlike the library."""
        if not x or level <= 0:
            return "{...}" if x else "{}"
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, _SHOWN)]
        return "{" + ", ".join(shown + ["..."] * (len(x) > _SHOWN)) + "}"

    def repr_bool(self, x: bool, level: int) -> str:
        """As ``spelled``, within lists and dictionaries, too."""
        return spelled(x)

    def repr_NoneType(self, x: None, level: int) -> str:
        """As ``spelled``."""
        return spelled(x)


_beginning = _Beginning()
_SPELLED = {True: "true", False: "false", None: "null"}


def spelled(value: object) -> str:
    """A value as requests and files spell it: in JSON and YAML, true, false and null are not Python's words."""
    return _SPELLED[value] if value is None or isinstance(value, bool) else f"{value}"


def quoted(value: object) -> str:
    """As ``repr``, in the words of ``spelled``: a text that looks like another value is told from it."""
    return _beginning.repr(value)


class OutriderError(Exception):
    """Root of all errors raised on purpose; ``str(error)`` may be shown to users."""


class InvalidArgument(OutriderError):
    """A field of the request is wrong.

    Attributes:
        field: the field's name, as the request spells it.
        value: its value, shortened to 80 characters.
        allowed: which values are allowed.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value if isinstance(value, str) and value else _beginning.repr(value)
        if len(self.value) > _SHOWN:
            self.value = self.value[: _SHOWN - 3] + "..."
        self.allowed = allowed
        super().__init__(f"{field} is {self.value}: must be {allowed}")

    @override
    def __reduce__(self) -> tuple[type[InvalidArgument], tuple[str, str, str]]:
        """Pickle by the arguments of ``__init__``."""
        return type(self), (self.field, self.value, self.allowed)


class PromptTooLong(InvalidArgument):
    """A text has more tokens than the model's context: a prompt that leaves no room for an answer, or a prediction."""


class MalformedTree(InvalidArgument):
    """A draft breaks the rules of ``TokenTree``."""


# What stands for no value: every object that a setting may hold is one.
_NO_VALUE = object()


class ConfigurationError(OutriderError):
    """A setting, an option of a command line or a file is wrong; the message names it and says what to do.

    The message is made of what is given: ``place: field verb value, given: why: must be allowed``.

    Attributes:
        field: what is wrong, as its user spells it; empty where the message is about no single one.
        value: its value, as the message shows it; empty where it shows none.
        allowed: which values are allowed; empty where the message says something else.
    """

    def __init__(
        self,
        why: str = "",
        *,
        field: object = "",
        value: object = _NO_VALUE,
        allowed: str = "",
        verb: str = "is",
        given: str = "",
        place: object = "",
        about: object = "",
    ) -> None:
        """Refuse.

        Args:
            why: what is wrong with the value, and what to do; alone, the whole message.
            verb: stands between the field and its value; empty for an option that is shown as it was typed.
            given: what else counts against the value.
            place: where the field stands, or what cannot be done because of it.
            about: the field, where ``why`` is the whole message and names it already, and its value.
        """
        self.field, self.allowed = f"{field or about}", allowed
        self.value = "" if value is _NO_VALUE else spelled(value)
        subject = (
            f"{field}"
            if about or value is _NO_VALUE
            else f"{field} {verb} {self.value}"
            if verb
            else f"{field} {self.value}"
        )
        subject += f", {given}" if given else ""
        # Values come from files, and may have several lines.
        parts = (f"{place}", subject.replace("\n", " "), why, f"must be {allowed}" if allowed else "")
        super().__init__(": ".join(part for part in parts if part))


class Unauthenticated(OutriderError):
    """The call carries no API key, or an unknown one."""


class PermissionDenied(OutriderError):
    """The call's API key is valid and may not do this."""


class NotFound(InvalidArgument):
    """The named model is not served here."""


class ResourceExhausted(OutriderError):
    """No room for another request at the moment.

    Attributes:
        retry_after_s: seconds after which a retry makes sense.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)

    @override
    def __reduce__(self) -> tuple[type[ResourceExhausted], tuple[str, float]]:
        """Pickle by the arguments of ``__init__``."""
        return type(self), (str(self), self.retry_after_s)


class Unavailable(OutriderError):
    """A component is starting, stopping or gone; a retry may reach another."""


class NotBegun(Unavailable):
    """No verifier has begun the request, so it cannot have been what failed one: it may be tried again without risk."""


class NodeTaken(Unavailable):
    """The verifier's machine was taken away in the middle of the request, in order: no sign against the request."""


class TargetLost(Unavailable):
    """A pipeline stage has died or hangs, or disagrees with the others on what was committed. The target must be rebuilt."""


class DeadlineExceeded(OutriderError):
    """The caller's deadline has passed."""


class Cancelled(OutriderError):
    """The caller went away."""


class Internal(OutriderError):
    """A bug in Outrider. The message says nothing about the cause; the log does."""
