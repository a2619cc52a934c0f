"""All forms of calls that are read."""

from __future__ import annotations

from services.tool_formats.hermes import Hermes
from services.tool_formats.interface import ToolFormat

_ALL: tuple[ToolFormat, ...] = (Hermes(),)

# By name; of two that read the same call, the first one counts.
FORMATS: dict[str, ToolFormat] = {form.name: form for form in _ALL}
