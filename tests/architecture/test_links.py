"""Links in all Markdown files of the repository lead somewhere: to a file that is there, and to a heading in it."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()
PAGES = [name for name in TRACKED if (ROOT / name).is_file()]
# Made when the site is built.
MADE = {"docs/cli.md"}
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s\"[^\"]*\")?\)")
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: Counter[str] = Counter()
    made = set(re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text()))
    in_code = False
    for line in page.read_text().splitlines():
        in_code ^= line.startswith("```")
        if in_code or not (heading := re.match(r"#{1,6} (.+)", line)):
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading[1])
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        made.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return frozenset(made)


def broken(page: Path) -> list[str]:
    wrong = []
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if str(file).removeprefix(f"{ROOT}/") in MADE:
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("name", PAGES)
def test_links_resolve(name: str) -> None:
    assert broken(ROOT / name) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One *two*\n\n[a](other.md) [b](#one-two) [c](#three) ![d](no.svg)\n\n```\n[e](f.md)\n```\n`[g](h.md)`\n"
    )
    assert broken(page) == ["other.md", "#three", "no.svg"]


def test_pages_are_linked() -> None:
    pages = [name for name in PAGES if name.startswith("docs/")]
    assert len(pages) > 25 and sum(len(_LINK.findall((ROOT / name).read_text())) for name in pages) > 100
