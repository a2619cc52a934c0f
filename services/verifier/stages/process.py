"""A process of a target other than the verifier's own: a rank of a pipeline stage. It follows the verifier's orders.

python -m services.verifier.stages.process SPECIFICATION      (JSON; only the verifier starts it)
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from functools import partial
from pathlib import Path

import torch

from services.logs.clean import clean_logs
from services.verifier.checks.guard import check_slice
from services.verifier.choosing.sought import Sought
from services.verifier.config import TargetConfig
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model.means import MEANS
from services.verifier.model.new_weights import weights_of_part
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target_port import Rows
from services.verifier.stages.activations import Activations, Health, receive_activations, receive_beat, send_activations
from services.verifier.stages.beside import Listening
from services.verifier.stages.exchange import Exchange, attend_meeting, claim_gpu
from services.verifier.stages.orders import Op, read_orders
from services.verifier.stages.same_weights import read_as_told
from services.verifier.stages.settling import IDLE_S, follow
from services.verifier.stages.split_adapters import StageAdapters
from services.verifier.stages.split_weights import StageWeights
from services.verifier.stages.upstream import StageSpec
from services.verifier.stages.ways import device_of_process
from speculation.errors import ConfigurationError, Internal, TargetLost

log = logging.getLogger(__name__)


class Stage:
    """Follows orders until it is stopped or another process is gone."""

    def __init__(self, part: ModelSlice, exchange: Exchange, weights: StageWeights) -> None:
        self._part = part
        self._exchange = exchange
        self._weights = weights
        self._lengths: dict[str, int] = {}

    def run(self) -> None:
        """Follow orders until ``Op.STOP``.

        Raises:
            TargetLost: another stage is gone.
        """
        verifier, length = self._exchange.size - 1, torch.empty(1, dtype=torch.int64)
        while True:
            self._exchange.receive(length, verifier)
            message = torch.empty(int(length), dtype=torch.int64)
            self._exchange.receive(message, verifier)
            for op, arguments, batch in read_orders(message.tolist()):
                if op is Op.STOP:
                    return
                self._obey(op, arguments, batch)

    def _obey(self, op: Op, arguments: tuple[int, ...], batch: tuple[Rows, ...]) -> None:
        adapters = self._part.adapters
        match op:
            case Op.PASS:
                version, *sought = arguments
                self._pass(batch, Sought.of_numbers(sought), version)
            case Op.BEAT:
                self._beat()
            case Op.EXCHANGE:
                self._weights.exchange(*arguments)
            case Op.DROP_WEIGHTS:
                self._weights.drop(*arguments)
            case Op.DROP_ADAPTER:
                # A stage that could not load it has none of the number.
                if adapters is not None and (number := str(arguments[0])) in adapters.digests:
                    adapters.remove(number)
            case Op.DRAFT_BY:
                assert adapters is not None
                adapters.draft_by_added(str(arguments[0]))
            case _:
                self._obey_for(str(arguments[0]), op, arguments[1:])

    def _obey_for(self, request: str, op: Op, arguments: tuple[int, ...]) -> None:
        memory, adapters = self._part.memory, self._part.adapters
        match op:
            case Op.OPEN:
                shared, *blocks = arguments
                memory.assign(request, blocks, len(blocks) - shared)
                self._lengths[request] = shared * BLOCK
            case Op.GROW:
                memory.assign(request, arguments, len(arguments))
            case Op.KEEP:
                context, *rows = arguments
                memory.keep(request, context, rows)
                self._lengths[request] = context + len(rows)
            case Op.LOAD_STATE:
                memory.load_state(request, *arguments)
            case Op.SAVE_STATE:
                memory.save_state(request, *arguments)
            case Op.ADAPT:
                assert adapters is not None
                adapters.assign(request, str(arguments[0]))
            case _:
                memory.forget(request)
                self._lengths.pop(request, None)
                if adapters is not None:
                    adapters.forget(request)

    def _beat(self) -> None:
        if not self._part.is_first:
            receive_beat(self._exchange)
        if self._part.shards is not None:
            self._part.shards.beat(IDLE_S)
        if not self._part.is_last:
            send_activations(self._exchange, Health.FINE, Activations())

    def _pass(self, batch: tuple[Rows, ...], sought: Sought, version: int) -> None:
        """Run one pass; in any case the next stage is told how it went.

        Raises:
            TargetLost: it failed, and other ranks of the stage wait within it.
        """
        health, made = Health.FINE, Activations()
        try:
            entering = self._entering(batch, version)
            hidden = self._part.run(batch, *entering, sought=sought)
            if self._part.is_last:
                return
            kept = self._part.hidden_states.handed_on(batch)
            made = Activations(self._exchange.ready(hidden), self._exchange.ready(kept))
        except TargetLost as error:
            log.error("process %d is out of step with the verifier: %s", self._exchange.rank, error)
            health = Health.DISAGREES
        except Internal:
            health = Health.FAILED
        except Exception:
            log.exception("a pass failed in process %d", self._exchange.rank)
            health = Health.FAILED
        if not self._part.is_last:
            send_activations(self._exchange, health, made)
        if health is not Health.FINE and self._part.shards is not None:
            raise TargetLost("a pass failed here, so this rank is out of step with the others of its stage")

    def _entering(self, batch: tuple[Rows, ...], version: int) -> Activations:
        """What a pass gets of the stage before, which still computes it while the pass is laid out here."""
        entering = Activations()
        try:
            self._weights.check(version)
            for rows in batch:
                if self._lengths.get(rows.request_id) != rows.context:
                    raise TargetLost(f"{self._lengths.get(rows.request_id)} tokens committed here, {rows.context} there")
            self._part.prepare(batch)
        finally:
            # In any case: what is sent is received, or the next pass would get it.
            if not self._part.is_first:
                entering = receive_activations(self._exchange, self._part, batch)
        return entering


def serve(spec: StageSpec) -> None:
    """Load the layers, join the other stages, and run until stopped.

    Raises:
        TargetLost: another stage is gone.
    """
    config = spec.config
    try:
        device = device_of_process(config.device, spec.process, config.processes)
        claim_gpu(spec.host, spec.port, spec.process, config.processes, torch.device(device))
        means = MEANS.settling(config, partial(follow, spec.host, spec.port, spec.process))
        load = partial(ModelSlice, config, spec.stage, rank=spec.rank, means=means)
        part, told = read_as_told(Path(config.model_path), spec.files, load)
        check_slice(part, config.stages)
        part.round_cache()
        asked = Listening(spec.host, spec.port, spec.process)
        if part.adapters is not None:
            StageAdapters(asked, spec.process, part.adapters, config)
        weights = StageWeights(asked, partial(weights_of_part, config, part, spec.stage, means, hashed=False))
    except TargetLost:
        raise
    except Exception as error:
        if not isinstance(error, ConfigurationError):
            log.exception("process %d cannot load its layers", spec.process)
        attend_meeting(spec.host, spec.port, spec.process, config.processes, refusal=str(error) or type(error).__name__)
        return
    exchange = attend_meeting(
        spec.host, spec.port, spec.process, config.processes, part.device,
        ranks=config.tensor_parallel_size, weights=told,
    )  # fmt: skip
    if exchange is None:
        return
    try:
        part.connect(exchange)
        asked.start()
        Stage(part, exchange, weights).run()
    finally:
        asked.stop()
        exchange.close()


def spec_to_json(spec: StageSpec) -> str:
    """A specification as the process's command-line argument."""
    return json.dumps(dataclasses.asdict(spec), default=str)


def spec_from_json(text: str) -> StageSpec:
    """The inverse of ``spec_to_json``."""
    fields = json.loads(text)
    config = fields["config"]
    for field in ("kernels_dir", "draft_adapter"):
        if config[field] is not None:
            config[field] = Path(config[field])
    config["observed_layers"] = tuple(config["observed_layers"])
    config["lora_folders"] = tuple(Path(folder) for folder in config["lora_folders"])
    return StageSpec(**{**fields, "config": TargetConfig(**config)})


def main() -> None:
    """Run the stage that the command line specifies."""
    clean_logs()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    try:
        serve(spec_from_json(sys.argv[1]))
    except TargetLost as error:
        log.warning("the stage ends: %s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
