"""The documentation's site is built, without a broken link, a font or a style from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("zensical")


@pytest.mark.exhaustive
def test_the_site_is_built(tmp_path: Path) -> None:
    """As `make site` builds it, in a copy: --strict fails at a link to a page or a heading that is not there."""
    for name in ("docs", "sdk"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    made = [sys.executable, "-m", "typer", "cli.main", "utils", "docs", "--name", "outrider", "--title", "Command line"]
    page = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (tmp_path / "docs/cli.md").write_text(page)
    build = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert build.returncode == 0, build.stdout + build.stderr
    site = tmp_path / "build/site"
    named = set(re.findall(r'"([\w/-]+)\.md"', (ROOT / "zensical.toml").read_text()))
    assert len(named) > 25
    for name in named:
        text = (site / f"{name}.html").read_text()
        loaded = re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="(https?:[^"]+)"', text)
        assert not [url for url in loaded if "canonical" not in url], name
    assert "outrider serve" in (site / "cli.html").read_text()
    assert 'id="outrider.Client.generate"' in (site / "sdk.html").read_text()
    assert list(site.glob("search*")), "no search"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text()))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"cli.md"}
    assert {page for page in pages - named if not page.startswith("log/")} == set()
    assert named - pages == {"cli.md"}
