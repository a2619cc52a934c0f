"""A file that an operator keeps as a YAML list, such as of keys or of rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.yaml_text import read_yaml
from speculation.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class ListFile:
    """What is known of such a file before it is read.

    Attributes:
        setting: names the file, for errors.
        most_bytes: of its content.
        holds: what it is, for errors, such as "a list of keys".
    """

    setting: str
    most_bytes: int
    holds: str

    def read(self, path: Path) -> bytes:
        """Its content; of one that is too long, enough for ``entries`` to know it.

        Raises:
            ConfigurationError: it cannot be read.
        """
        try:
            with path.open("rb") as file:
                return file.read(self.most_bytes + 1)
        except OSError as error:
            raise ConfigurationError(f"cannot be read ({error.strerror})", field=self.setting, value=path) from error

    def entries(self, content: bytes, path: Path) -> list[object]:
        """The list in its content.

        Raises:
            ConfigurationError: it is too long, no YAML, or no list.
        """
        if len(content) > self.most_bytes:
            raise ConfigurationError(f"larger than {self.most_bytes >> 20} MiB", field=self.setting, value=path)
        try:
            entries = read_yaml(content.decode("utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{error}", field=self.setting, value=path) from error
        if not isinstance(entries, list):
            raise ConfigurationError(field=self.setting, value=path, allowed=self.holds)
        return entries
