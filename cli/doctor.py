"""``outrider doctor``: says what a machine lacks, or has wrong, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from cli.doctor_checks import Finding, findings
from cluster.settings.config import Settings

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def examine(settings: Settings, *, as_json: bool) -> bool:
    """Make every check and print what it found, a line each. Returns whether none has failed."""
    console = Console()
    found: list[Finding] = []
    for finding in findings(settings):
        found.append(finding)
        if not as_json:
            _print(console, finding)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], ensure_ascii=False, indent=1))
    return all(finding.status != "fail" for finding in found)


def _print(console: Console, finding: Finding) -> None:
    status = f"[{_COLOURS[finding.status]}]{finding.status:4}[/]"
    console.print(f"{status}  {finding.check:18} {escape(finding.found)}", highlight=False, soft_wrap=True)
    if finding.advice:
        console.print(f"      {'':18} -> {escape(finding.advice)}", highlight=False, soft_wrap=True)
