"""The documentation's site is built, without a broken link, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from lab import concept_pictures
from tests.running.site import ROOT, build

CONFIG = (ROOT / "zensical.toml").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.exhaustive
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    site = build(tmp_path)
    named = set(re.findall(r'"([\w/-]+)\.md"', CONFIG))
    assert len(named) > 25
    for name in named:
        text = (site / f"{name}.html").read_text()
        loaded = re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="((?:https?:)?//[^"]+)"', text)
        assert not [url for url in loaded if "canonical" not in url], name
        # What the theme's script finds it fetches from elsewhere.
        assert not re.search(r'class="[^"]*\b(mermaid|glightbox|pyodide)\b', text), name
    assert "outrider serve" in (site / "cli.html").read_text()
    assert 'id="outrider.Client.generate"' in (site / "sdk.html").read_text()
    assert list(site.glob("search*")), "no search"


def test_neither_configuration_nor_pages_name_a_script_a_font_or_a_style_from_elsewhere() -> None:
    project = tomllib.loads(CONFIG)["project"]
    assert project["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript", "extra"} & set(project)
    assert "://" not in re.sub(r"#.*", "", CONFIG) and "mermaid" not in str(project)
    for page in PAGES:
        text = page.read_text()
        assert not re.search(r"^ *(```|~~~) *(\{ *\.)?(mermaid|pyodide)", text, re.MULTILINE), page
        assert not re.search(r"!\[[^\]]*\]\((https?:)?//|<(script|link|img|iframe|style)\b", text), page


def test_the_diagrams_are_those_that_the_script_draws() -> None:
    text = (ROOT / "docs/concepts.md").read_text()
    for name, picture in concept_pictures.PICTURES.items():
        file = concept_pictures.PLOTS / f"{name}.svg"
        assert file.read_text() == concept_pictures.drawn(picture), "python -m lab.concept_pictures"
        assert f"![{picture.about}](plots/{name}.svg)" in text


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r'"([\w/-]+\.md)"', CONFIG))
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES} - {"cli.md"}
    assert {page for page in pages - named if not page.startswith("log/")} == set()
    assert named - pages == {"cli.md"}


def test_every_page_says_in_its_first_lines_whom_it_is_for() -> None:
    readers = re.compile(r"\b[Ff]or (those (who|whose)|operators|everybody|whoever)\b")
    # The first page has a list of readers, and where each goes on.
    pages = [page for page in PAGES if page.parent.name != "log" and page.name not in ("index.md", "cli.md")]
    assert [page.name for page in pages if not readers.search("\n".join(page.read_text().splitlines()[:7]))] == []
