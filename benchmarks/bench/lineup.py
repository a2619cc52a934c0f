"""The contestants of a run, and the processes they live in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench import gguf_forms
from benchmarks.bench.child_process import OUR_PEER, WorkerProcess
from benchmarks.bench.contestants import PEERS, PLAIN, Environments, WorkerContestant
from benchmarks.bench.records import ContestantFailed
from cluster.models.target import ResolvedModel, as_float32
from cluster.settings.config import Settings
from services.machine.processor import cores
from speculation.errors import ConfigurationError

# Peers reserve memory for the longest context; prompts here are far shorter than this.
_LONGEST_CONTEXT = 8192
_OURS = "outrider"


@dataclass(frozen=True, kw_only=True, slots=True)
class LineupConfig:
    """Who takes part, and where to find them.

    Attributes:
        on_ray: run Outrider's components as processes on a local Ray, linked by gRPC; otherwise in one process.
        timeout_s: longest time per request.
        assistant: folder of the draft model of ``hf_assisted``.
        gguf: GGUF file for llama.cpp, read unchanged or converted.
        peer_pythons: interpreters of peers by environment; the others are looked for in the cache folder.
    """

    strategies: tuple[str, ...]
    peers: tuple[str, ...] = ()
    on_ray: bool = False
    timeout_s: float = 120.0
    assistant: Path | None = None
    gguf: Path | None = None
    peer_pythons: dict[str, Path] = field(default_factory=dict)


class Lineup:
    """All contestants that could be loaded. Plain decoding comes first: all others are compared with it.

    Attributes:
        contestants: strategies, then peers, each in the order of the command line.
        missing: peers that do not take part, with the reason.
    """

    def __init__(self, config: LineupConfig, settings: Settings, model: ResolvedModel, logs: Path) -> None:
        self.contestants: list[WorkerContestant] = []
        self.missing: dict[str, str] = {}
        self.strategies = (PLAIN, *(name for name in config.strategies if name != PLAIN))
        self.peers = config.peers
        self.on_ray = config.on_ray
        self.threads = settings.verifier.threads or cores()
        self._config = config
        self._settings = settings
        self._model = model
        self._logs = logs
        self._engines: dict[str, WorkerProcess] = {}

    def load(self, telling: Callable[[str], AbstractContextManager[None]]) -> None:
        """Start all processes and load the model into each. ``telling`` wraps each step and reports its time.

        Raises:
            ContestantFailed: Outrider itself does not start.
        """
        ours = self._engine(_OURS, Path(sys.executable), OUR_PEER, _OURS)
        with telling("Loading Outrider"):
            ours.load()
        self.contestants = [WorkerContestant(name=name, engine=ours) for name in self.strategies]
        for name in self.peers:
            try:
                with telling(f"Loading {PEERS[name].about}"):
                    self.contestants.append(self._load_peer(name))
            except ContestantFailed as error:
                self.missing[name] = str(error)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together, the same for every contestant."""
        model = _read_json(self._model.path / "config.json")
        longest: int = min(model.get("max_position_embeddings", _LONGEST_CONTEXT), _LONGEST_CONTEXT)
        return self._settings.verifier.max_model_len or longest

    def engine_of(self, contestant: str) -> WorkerProcess | None:
        """The process of a contestant; None if it was never started."""
        return self._engines.get(PEERS[contestant].engine if contestant in PEERS else _OURS)

    def transformers(self) -> WorkerProcess:
        """A process that can compute the target's logits."""
        return self._engine("hf", Path(sys.executable), "peer_hf", "hf")

    def close(self) -> None:
        """End all processes in parallel, since some take seconds to end."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(WorkerProcess.close, self._engines.values()))

    def _load_peer(self, name: str) -> WorkerContestant:
        kind = PEERS[name]
        if kind.needs and getattr(self._config, kind.needs) is None:
            raise ContestantFailed(f"it needs --{kind.needs}")
        environments = Environments(
            cache_dir=self._settings.cache_dir, device=self._settings.verifier.device, chosen=self._config.peer_pythons
        )
        engine = self._engine(kind.engine, environments.python(kind), kind.module, name)
        engine.load()
        return WorkerContestant(name=name, engine=engine, most_at_once=kind.most_at_once)

    def _engine(self, key: str, python: Path, module: str, contestant: str) -> WorkerProcess:
        if key not in self._engines:
            log = self._logs / f"{key}.log"
            # Ray's processes expect heartbeats from each other, so they must not be stopped.
            rests = key != _OURS or not self.on_ray
            self._engines[key] = WorkerProcess(
                python, module, self._spec(contestant), log, self._config.timeout_s, rests=rests
            )
        return self._engines[key]

    def _gguf_for(self, contestant: str) -> Path | None:
        """The GGUF file in the form that a peer needs, converted if necessary; None without a file.

        Raises:
            ContestantFailed: the file cannot be converted.
        """
        form, gguf = PEERS[contestant].gguf_form if contestant in PEERS else None, self._config.gguf
        if gguf is None or form is None:
            return gguf
        try:
            return gguf_forms.brought_into(form, gguf, self._settings.cache_dir / "models")
        except ConfigurationError as error:
            raise ContestantFailed(str(error)) from error

    def _spec(self, contestant: str) -> dict[str, Any]:
        verifier, config = self._settings.verifier, self._config
        model = _read_json(self._model.path / "config.json")
        eos = _read_json(self._model.path / "generation_config.json").get("eos_token_id", model.get("eos_token_id"))
        return {
            "contestant": contestant,
            "model": self._model.name,
            # Peers read only plain (unquantised) weights.
            "model_path": str(as_float32(self._model.path) if contestant in PEERS else self._model.path),
            "dtype": verifier.dtype,
            "device": verifier.device,
            "threads": self.threads,
            "max_model_len": self.max_model_len,
            "eos_token_ids": eos if isinstance(eos, list) else [eos] if eos is not None else [],
            "assistant": str(config.assistant) if config.assistant else None,
            "gguf": str(gguf) if (gguf := self._gguf_for(contestant)) else None,
            "settings": self._settings.model_dump(mode="json"),
            "on": "ray" if self.on_ray else "process",
        }


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content
