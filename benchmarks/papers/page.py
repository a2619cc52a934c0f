"""One page of several papers, made of the folders of their runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench.plots import draw
from benchmarks.bench.tables import Table, as_object, markdown
from benchmarks.papers.run import changed_answers
from benchmarks.papers.units import Paper

_HEAD = """# The papers, rerun

For those who know the papers. Made by `outrider paper page`, not written by hand: each section is made from the results of
`outrider paper NAME`, measured with our own engine on one machine, one request at a time. The last column has the paper's
figures, from other models and other machines; the footnotes say what else is not the paper's experiment. Every row that
decodes is compared with plain decoding, token for token: the column `= plain` counts the answers that are equal.

τ is the number of tokens per pass of the target. The column `a step costs` tells what a step takes, drafting included, in
passes of plain decoding. A strategy pays where that is below τ; `auto` leaves it alone where it is not. Rows draft as many
tokens as their paper does, whatever that costs: on a GPU that waits for memory sixty drafted tokens are nearly free, on a
few cores each of them is paid for.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperSection:
    """A paper and its results so far.

    Attributes:
        run: what the folder is a run of.
        results: by unit.
    """

    paper: Paper
    run: Mapping[str, Any]
    results: Mapping[str, Mapping[str, Any]]

    @property
    def tables(self) -> list[Table]:
        """The paper's tables."""
        return self.paper.tables(self.results)

    @property
    def missing(self) -> list[str]:
        """Units that are not measured."""
        return [unit for unit in self.run["units"] if unit not in self.results]

    def as_object(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "paper": self.paper.name,
            "run": dict(self.run),
            "changed": changed_answers(self.results),
            "missing": self.missing,
            "tables": [as_object(table) for table in self.tables],
        }


def write_page(file: Path, sections: Sequence[PaperSection], unmeasured: Sequence[str], plots: Path) -> None:
    """Write the page, and its plots into the folder ``plots``.

    Args:
        unmeasured: papers without results.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    parts = [_HEAD]
    for section in sections:
        drawn = draw({"units": section.results}, plots, section.paper.plots) if section.paper.plots else []
        links = [f"![{title}]({os.path.relpath(path, file.parent)})\n" for title, path in drawn]
        parts += [section_text(section), *links]
    for name in unmeasured:
        parts.append(f"## {name}\n\nNot measured: `outrider paper {name}` does it.\n")
    file.write_text("\n".join(parts))


def section_text(section: PaperSection) -> str:
    """A paper's section, without its plots."""
    paper, run = section.paper, section.run
    lines = [f"## {paper.title}", "", f"{paper.about}.", "", *_facts(section), ""]
    if changed := changed_answers(section.results):
        lines += [f"**NOT LOSSLESS: {len(changed)} answers differ from plain decoding's: {'; '.join(changed)}.**", ""]
    if section.missing:
        lines += [f"Not measured yet: {', '.join(section.missing)}.", ""]
    lines += [markdown(table) for table in section.tables]
    notes = list(run["deviations"])
    if run["quick"]:
        notes.insert(0, "A quick run: few prompts and short answers, so that last digits mean little.")
    lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, ""])


def _facts(section: PaperSection) -> list[str]:
    run, results = section.run, section.results.values()
    days = sorted({result["measured"][:10] for result in results})
    commits = sorted({str(result["commit"]) for result in results})
    minutes = sum(result["duration_s"] for result in results) / 60
    facts = (
        ("command", f"`{run['command']}`"),
        ("model", run["model"]),
        ("prompts", _asked(run)),
        ("machine", f"{run['processor']} ({run['instructions']}), {run['threads']} threads"),
        ("measured", f"{', '.join(days) or 'nothing'}; {minutes:.0f} min; commit {', '.join(commits) or '–'}"),
    )
    return [f"- {name}: {value}" for name, value in facts]


def _asked(run: Mapping[str, Any]) -> str:
    return f"{run['prompts']}: {run['requests']} requests, up to {run['max_tokens']} tokens, seeds from {run['seed']}"
