"""The documentation's site, built as `make site` builds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(folder: Path) -> Path:
    """Build it in a copy, in a folder; returns the site's own. --strict fails at a link that leads nowhere."""
    for name in ("docs", "sdk"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", folder)
    made = [sys.executable, "-m", "typer", "cli.main", "utils", "docs", "--name", "outrider", "--title", "Command line"]
    page = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (folder / "docs/cli.md").write_text(page)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build/site"
