"""What the images are built from: every dependency pinned with hashes, no more of the repository than is needed."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cluster import ship_native
from cluster.checks.pods import IMAGE_CUDA, OLDEST_DRIVER, too_old

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "k8s" / "images"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": ("cpu", "tracing"), "gpu": ("gpu", "int8", "tracing")}
# An environment like that of the images.
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11", "extra": ""}


def pinned(lock: str) -> dict[str, str]:
    """The versions in a lock, by canonical names."""
    text = (IMAGES / f"{lock}.lock").read_text()
    entries = re.split(r"\n(?=\S)", text)
    found = {}
    for entry in entries:
        if match := re.match(r"([A-Za-z0-9._-]+)==(\S+)", entry):
            assert "--hash=sha256:" in entry, entry
            found[canonicalize_name(match[1])] = match[2]
    return found


@pytest.mark.parametrize("target", EXTRAS)
def test_the_lock_holds_what_the_project_needs(target: str) -> None:
    versions = pinned(target)
    wanted = [
        *PROJECT["dependencies"],
        *(each for extra in EXTRAS[target] for each in PROJECT["optional-dependencies"][extra]),
    ]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name == "outrider" or (requirement.marker is not None and not requirement.marker.evaluate(LINUX)):
            continue
        assert name in versions, f"{name} is not in {target}.lock: run k8s/images/lock"
        assert requirement.specifier.contains(versions[name], prereleases=True), f"{requirement}: run k8s/images/lock"


def test_each_target_has_its_own_pytorch() -> None:
    assert pinned("cpu")["torch"].endswith("+cpu")
    assert not [name for name in pinned("cpu") if name.startswith(("nvidia-", "cuda-"))]
    assert "+" not in pinned("gpu")["torch"] and "nvidia-nccl-cu13" in pinned("gpu")


def test_both_targets_run_as_nobody_in_particular() -> None:
    text = (IMAGES / "Dockerfile").read_text()
    assert "USER 10001:10001" in text
    for target in EXTRAS:
        # What comes after the user is copied, and belongs to root.
        assert re.search(rf"^FROM runtime AS {target}$", text, re.MULTILINE)
    runtime, gpu = text[text.index("FROM system AS runtime") :].split("FROM runtime AS gpu")
    assert not re.search(r"gcc|USER (root|0)|apt-get", runtime)
    assert re.findall("USER (.*)", gpu)[-1] == "10001:10001"
    assert "--require-hashes" in text and "--pull" not in text


def test_triton_can_compile_and_keep_its_kernels_in_the_image_for_gpus() -> None:
    """It compiles what launches them with a C compiler and Python's headers."""
    gpu = (IMAGES / "Dockerfile").read_text().split("FROM runtime AS gpu")[1]
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(gpu.split())
    volume = yaml.safe_load((ROOT / "k8s/outrider/values.yaml").read_text())["storage"]["mountPath"]
    assert f"TRITON_CACHE_DIR={volume}/" in gpu
    # Otherwise pods that ask for no GPU would see all of their node.
    assert "NVIDIA_VISIBLE_DEVICES" not in gpu


def test_what_the_image_for_gpus_has_suffices_to_compile_tritons_launcher(tmp_path: Path) -> None:
    """With a C compiler and Python's headers, as there; the driver's library, which a node mounts, is an empty one here."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if shutil.which("gcc") is None or not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        pytest.skip("no C compiler, or no headers of Python's, here")
    subprocess.run(["gcc", "-shared", "-o", tmp_path / "libcuda.so.1", "-xc", "/dev/null"], check=True)
    program = (
        "from triton.runtime.build import compile_module_from_file\n"
        "from triton.backends.nvidia import driver\n"
        "import os, pathlib\n"
        "source = str(pathlib.Path(driver.__file__).parent / 'driver.c')\n"
        "try:\n"
        "    compile_module_from_file(source, 'cuda_utils', driver.library_dirs(), driver.include_dirs, driver.libraries)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "kept")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert driver.libraries and list((tmp_path / "kept").rglob("cuda_utils*.so"))


def test_the_context_holds_the_packages_and_no_more() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = [
        path.name for path in ROOT.iterdir() if path.is_dir() and any(fnmatch.fnmatch(path.name, each) for each in patterns)
    ]
    assert set(packages) <= set(allowed)
    assert not {"tests", "build", ".git", "k8s", "docs", "sdk"} & set(allowed)
    for path in allowed:
        assert (ROOT / path).exists(), path


def test_all_c_code_is_compiled_into_an_image(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every library that can be shipped is, by the command that makes an image."""
    assert re.findall(r"-m (\S+)$", (IMAGES / "finish").read_text(), re.MULTILINE) == [ship_native.__name__]
    can = {file.parent.parent.name for file in (ROOT / "services").glob("**/native/library.py")}
    libraries = (ship_native.kernels, ship_native.drafting, ship_native.deciding)
    assert {Path(library.__file__).parent.parent.name for library in libraries} == can
    for library in libraries:
        made = [Path("a"), Path("b")] if library is ship_native.kernels else Path(library.__name__)
        monkeypatch.setattr(library, "ship", lambda made=made: made)
    ship_native.main()
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_charts_version_is_the_projects() -> None:
    chart = yaml.safe_load((ROOT / "k8s" / "outrider" / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]
    assert f"outrider:{PROJECT['version']} " in (IMAGES / "Dockerfile").read_text()
    assert (
        f"ray=={yaml.safe_load((ROOT / 'k8s/outrider/values.yaml').read_text())['ray']['version']}"
        in (IMAGES / "cpu.lock").read_text()
    )


def test_a_plan_knows_the_cuda_of_the_image() -> None:
    """And which drivers run it: the last of CUDA 12 do not run CUDA 13 (its release notes)."""
    assert pinned("gpu")["cuda-toolkit"].startswith(f"{IMAGE_CUDA}.")
    assert OLDEST_DRIVER == 580
    assert [driver for driver in ("550.54.15", "575.57.08", "580.65.06", "590") if too_old(driver)] == [
        "550.54.15",
        "575.57.08",
    ]
