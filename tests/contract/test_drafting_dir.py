"""A drafter and its retrieval need to write nothing where the models lie: in the chart that volume is read-only for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.models.target import ResolvedModel
from cluster.settings import component_configs
from cluster.settings.config import load
from retrieval_index.embedded import embedded_redis
from retrieval_index.store import IndexStore
from tests.drafters.indexes import build_of
from tests.servers.service import tiny_settings

_CAN_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
)
_DRAFTS = """
import asyncio, json, sys
from pathlib import Path
from cluster.models.target import ResolvedModel
from cluster.outside.drafter import drafting
from cluster.process.logs import start_logging
from cluster.settings.config import load
from cluster.settings.operating import LoggingSettings

async def main():
    settings = load(flags=json.loads(sys.argv[1]), environ={})
    try:
        (settings.cache_dir / "x").write_text("x")
    except OSError as error:
        print(error.strerror)
    async with drafting(settings, ResolvedModel(name="tiny", path=settings.cache_dir / "model")):
        for _ in range(600):
            if any(found.is_dir() and not found.name.endswith(".partial") for found in settings.drafting_dir.glob("indexes/*/*")):
                break
            await asyncio.sleep(0.1)

start_logging(LoggingSettings(level="warning"))
asyncio.run(main())
"""


def test_both_write_to_one_folder(tiny_model: Path) -> None:
    model = ResolvedModel(name="tiny", path=tiny_model)
    for flags, root in ((["drafting_dir=/own"], Path("/own")), ([], Path("/shared"))):
        settings = load(
            flags=["cache_dir=/shared", "retrieval.redis_url=redis://127.0.0.1:1", *flags, "drafter.keep_calibration=true"],
            environ={},
        )
        calibration = component_configs.drafter_config(settings, model).calibration
        assert calibration is not None and calibration.is_relative_to(root)
        assert component_configs.retrieval_config(settings, model).cache_dir == root / "indexes"
        # What the target's process measures stays where it was.
        assert component_configs.verifier_config(settings, model).costs_dir == Path("/shared/costs")


@pytest.mark.exhaustive
@pytest.mark.skipif(not _CAN_MOUNT or os.geteuid() != 0, reason="only root may mount, and not in every container")
def test_they_start_where_the_models_volume_is_read_only(tiny_model: Path, tmp_path: Path) -> None:
    volume, own = tmp_path / "volume", tmp_path / "own"
    shutil.copytree(tiny_model, volume / "model")
    own.mkdir()
    (tmp_path / "token").write_text("a token of sixteen")
    build_of(tmp_path / "index", tiny_model, [1, 2, 3, 4] * 8)
    with embedded_redis() as url:
        with IndexStore(url, "default") as store:
            version = store.publish(tmp_path / "index")
        flags = [
            *tiny_settings(), f"cache_dir={volume}", f"drafting_dir={own}", f"retrieval.redis_url={url}",
            f"internal_token_file={tmp_path / 'token'}", "drafter.keep_calibration=true",
        ]  # fmt: skip
        flags.remove("drafter.keep_calibration=false")
        within = f'mount --bind {volume} {volume} && mount -o remount,ro,bind {volume} && exec "$@"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", within, "sh", sys.executable, "-c", _DRAFTS, json.dumps(flags)],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Read-only file system\n"
    assert "Read-only" not in done.stderr
    assert [found.name for found in own.glob("indexes/*/*") if found.is_dir()] == [version]
