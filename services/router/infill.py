"""Fill-in-the-middle: the tokens that mark what stands before a gap and behind it, found by their names.

The names of the tokens are llama.cpp's (``llama-vocab.cpp``), and so is the form in which other files are put in front
(``format_prompt_infill``). The parts come in the order prefix, suffix, middle (arXiv 2207.14255, section 3), on which all of
these models were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.api.messages import Infill

# Before the prefix, before the suffix, before the middle.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<repo_name>")
_FILE = ("<|file_sep|>", "<file_sep>")
# Tokens that a model writes where a gap is filled, besides its own end of a text.
_ENDS = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "▁<EOT>", "<EOT>", "<|file_separator|>", *_REPOSITORY, *_FILE)
# What llama-server calls a repository and a file that have no name, and what it puts before a file's text where the model
# has no token for that.
_REPOSITORY_NAME, _FILE_NAME, _SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class InfillTokens:
    """Ids of a model's tokens.

    Attributes:
        repository, file: before the name of one; None: there is no such token.
        ends: they end an answer.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    ends: tuple[int, ...]

    def prompt(self, before: str, infill: Infill, encode: Encode) -> list[int]:
        """The ids of a prompt whose answer fills the gap.

        Args:
            before: the text before the gap.
            encode: the ids of a text within another.
        """
        around = [self.prefix, *encode(before), self.suffix, *encode(infill.suffix), self.middle]
        return [*self._others(infill, encode), *around]

    def _others(self, infill: Infill, encode: Encode) -> Iterator[int]:
        """Other files, before the one with the gap."""
        if not infill.files:
            return
        if self.repository is not None:
            yield from (self.repository, *encode(_REPOSITORY_NAME))
        for name, text in infill.files:
            if self.file is None:
                yield from encode(_SNIPPET + text)
            else:
                yield from (self.file, *encode(f"{name}\n{text}"))
        if self.file is not None:
            yield from (self.file, *encode(_FILE_NAME))


def infill_tokens(id_of: Callable[[str], int | None]) -> InfillTokens | None:
    """The tokens of a model; None: it was not trained to fill gaps.

    Args:
        id_of: the id of a token by its name; None: there is none.
    """
    ids = next((found for names in _MARKS if None not in (found := tuple(map(id_of, names)))), None)
    if ids is None:
        return None
    prefix, suffix, middle = (each for each in ids if each is not None)

    def first(names: Sequence[str]) -> int | None:
        return next((id for name in names if (id := id_of(name)) is not None), None)

    ends = tuple(dict.fromkeys(id for name in _ENDS if (id := id_of(name)) is not None))
    return InfillTokens(
        prefix=prefix, suffix=suffix, middle=middle, repository=first(_REPOSITORY), file=first(_FILE), ends=ends
    )
