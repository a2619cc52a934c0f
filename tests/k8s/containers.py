"""Builds an image without pulling anything, and runs commands in it as a pod would: uid 10001, read-only root, no capability.

Everything comes from Debian (mmdebstrap, buildah, runc) and PyPI, as root. What is built is kept in build/images, so that a second
time only what has changed is built.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_STORE = ROOT / "build" / "images"
_BASE = "docker.io/library/debian:bookworm-slim"
_MISSING = [name for name in ("buildah", "runc", "mmdebstrap") if shutil.which(name) is None]
needs_buildah = pytest.mark.skipif(
    bool(_MISSING) or os.geteuid() != 0,
    reason=f"no image can be built here: {', '.join(_MISSING) + ' missing' if _MISSING else 'only root may'} "
    "(Debian: apt install buildah runc mmdebstrap; as root)",
)
_BUILD_S, _RUN_S = 2400, 300


def buildah(*words: str, timeout_s: float = 120) -> str:
    """What buildah prints."""
    store = ["--root", str(_STORE / "root"), "--runroot", str(_STORE / "run"), "--storage-driver", "overlay"]
    return _run(["buildah", *store, *words], timeout_s)


def _run(command: Sequence[str], timeout_s: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr[-4000:]}"
    return done.stdout.strip()


def build(target: str, tag: str) -> None:
    """Build a target of k8s/images/Dockerfile; its base is made here."""
    _STORE.mkdir(parents=True, exist_ok=True)
    if not buildah("images", "--quiet", "--filter", f"reference={_BASE}"):
        with tempfile.TemporaryDirectory() as folder:
            tar = f"{folder}/base.tar"
            _run(["mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates", "bookworm", tar], _BUILD_S)
            container = buildah("from", "scratch")
            buildah("add", "--quiet", container, tar, "/")
            buildah("commit", "--quiet", "--rm", container, _BASE)
    flags = ["--isolation", "oci", "--runtime", "runc", "--network", "host", "--pull-never", "--layers"]
    # Where packages come from in this environment.
    if authority := os.environ.get("PIP_CERT"):
        flags += ["--volume", f"{authority}:/authority.pem:ro", "--build-arg", "PIP_CERT=/authority.pem"]
    if index := os.environ.get("PIP_INDEX_URL"):
        flags += ["--build-arg", f"PIP_INDEX_URL={index}"]
    if (wheels := os.environ.get("PIP_FIND_LINKS")) and Path(wheels).is_dir():
        flags += ["--volume", f"{wheels}:/torch:ro", "--build-arg", "TORCH_WHEELS=/torch"]
    file = str(ROOT / "k8s" / "images" / "Dockerfile")
    buildah("bud", *flags, "--target", target, "--tag", tag, "--file", file, str(ROOT), timeout_s=_BUILD_S)


class Container:
    """The files of an image, in which commands are run one at a time.

    Attributes:
        root: its files, as this machine sees them.
    """

    def __init__(self, tag: str, volume: Path) -> None:
        self._name = buildah("from", "--pull-never", tag)
        self._config = json.loads(buildah("inspect", "--type", "image", tag))["OCIv1"]["config"]
        self.root = Path(buildah("mount", self._name))
        self._volume = volume

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as its user, with its environment; /tmp and the folder of models alone can be written to."""
        with tempfile.TemporaryDirectory() as bundle:
            hosts = Path(bundle) / "hosts"
            hosts.write_text("127.0.0.1 localhost pod\n")
            (Path(bundle) / "config.json").write_text(json.dumps(self._specification(command, hosts)))
            return subprocess.run(
                ["runc", "--root", f"{bundle}/state", "run", "--bundle", bundle, f"outrider-{os.getpid()}"],
                capture_output=True, text=True, errors="replace", timeout=_RUN_S,
            )  # fmt: skip

    def _specification(self, command: Sequence[str], hosts: Path) -> object:
        user, _, group = self._config["User"].partition(":")
        none: dict[str, list[str]] = {kind: [] for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")}

        def memory(where: str) -> dict[str, object]:
            return {"destination": where, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}

        return {
            "ociVersion": "1.0.2",
            "root": {"path": str(self.root), "readonly": True},
            "hostname": "pod",
            "process": {
                "user": {"uid": int(user), "gid": int(group)},
                "args": list(command),
                "cwd": self._config["WorkingDir"],
                "env": self._config["Env"],
                "noNewPrivileges": True,
                "capabilities": none,
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", "ro"]},
                {"destination": "/etc/hosts", "type": "bind", "source": str(hosts), "options": ["bind", "ro"]},
                memory("/dev/shm"),
                memory("/tmp"),
                {"destination": "/var/lib/outrider", "type": "bind", "source": str(self._volume), "options": ["rbind"]},
            ],
            # A network of its own would have no way out; nothing is asked for there.
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
        }

    def remove(self) -> None:
        buildah("umount", self._name)
        buildah("rm", self._name)
