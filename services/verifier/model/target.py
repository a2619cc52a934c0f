"""The target: a transformers causal language model over our own KV cache, in one process or several."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from services.model_files.folder import reading
from services.verifier.checks.exactness import is_exact
from services.verifier.checks.guard import check_slice
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.sought import WHOLE_ROWS, Sought
from services.verifier.config import TargetConfig
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.parameters import inexact
from services.verifier.kv_cache.blocks import BlockAllocator
from services.verifier.kv_cache.kept_states import KeptStates
from services.verifier.kv_cache.pool import BLOCK, KVPool
from services.verifier.loading.memory import kept_states, state_slots
from services.verifier.model.checked_target import checked
from services.verifier.model.means import MEANS, TargetMeans
from services.verifier.model.new_weights import NewWeights, weights_of_part
from services.verifier.model.served_weights import served_weights
from services.verifier.model.slice import ModelSlice
from services.verifier.model.stream_rows import StreamRows, StreamWeights
from services.verifier.model.target_adapters import TargetAdapters
from services.verifier.model.target_port import ColumnRows, Outcome, Prefix, Rows, Sampling, SingleRows, StreamSpec
from services.verifier.model.to_device import Timed
from services.verifier.model.tree_rows import sizes_of
from services.verifier.stages.same_weights import NOTHING_READ
from services.verifier.stages.upstream import Launch, earlier_stages
from services.verifier.stages.ways import device_of_process
from speculation.errors import OutriderError, TargetLost
from speculation.messages import ServedWeights
from speculation.types import Features

log = logging.getLogger(__name__)


class TransformersTarget:
    """Implements ``target_port.Target``. The last pipeline stage is here, or its last rank; ``launch`` starts the others.

    Args:
        streams: streams that its passes may hold.
        means: what it is put together from.

    Raises:
        ConfigurationError: the model cannot be loaded or served; says why.
        TargetLost: a stage died while it was loading.

    Attributes:
        exact: whether a token's logits are the same bits whatever shares its pass, as measured at start. Otherwise answers
            are the same up to near ties.
    """

    def __init__(
        self,
        config: TargetConfig,
        launch: Launch | None = None,
        streams: StreamWeights | None = None,
        means: TargetMeans = MEANS,
    ) -> None:
        self._means = means
        known = checked(config)
        config, self._has_states = known.config, known.has_states
        assert config.max_model_len is not None
        self.max_model_len: int = config.max_model_len
        self.vocab_size, self.generation = known.vocab_size, known.generation
        self.eos_token_ids = self.generation.eos_token_ids
        self.depth, self.processes = config.stages, config.processes
        self.choosing_s = 0.0
        self._config, self._launch, self._streams = config, launch, streams
        # Those that this process has read, see ``Upstream``.
        self._files = NOTHING_READ
        self._under_way: deque[tuple[Sequence[Rows], Sought]] = deque()
        # Of each request that shares its prefix: the tokens computed and kept. Of each request: its rows in the last pass.
        self._tokens: dict[str, list[int]] = {}
        self._rows: dict[str, Rows] = {}
        self._adapters = TargetAdapters(Path(config.model_path))
        self._build()
        try:
            if config.draft_adapter is not None:
                self._adapters.load_for_noise(config.draft_adapter)
            for name, folder in config.lora_modules.items():
                self.load_adapter(name, Path(folder).expanduser())
        except BaseException:
            self.shutdown()
            raise

    def _build(self, part: ModelSlice | None = None) -> None:
        config = self._config
        self._earlier = earlier_stages(config, self._launch, self._files)
        self._files = replace(self._files, told=self._earlier.files)
        try:
            last = device_of_process(config.device, config.processes - 1, config.processes)
            self._earlier.claim(torch.device(last))
            # When another stage is lost, this process keeps its own part.
            if part is None:
                with reading(f"load the model at {config.model_path}", about=config.model_path):
                    rank = config.tensor_parallel_size - 1
                    means = self._means.settling(config, self._earlier.settle)
                    part = ModelSlice(config, config.stages - 1, self._streams, means=means, rank=rank)
                check_slice(part, config.stages)
                part.round_cache()
            else:
                self._earlier.keep_settled(part.choice.linears)
            self._part = part
            self._chooser = Chooser(self.eos_token_ids, self.generation.processors, part.library, self._means.reader)
            part.memory.clear()
            states = KeptStates(kept_states(config), config.mamba_block_size) if self._has_states else None
            self.blocks = BlockAllocator(self.pool.total_blocks, states)
            self._earlier.join(part)
            self._adapters.connect(part.adapters, self._earlier)
            self.exact = is_exact(self)
        except BaseException:
            self.shutdown()
            raise
        # The other stages have the same kinds of modules.
        blamed = [] if self.exact else inexact(part.model) or ["no layer is known for it"]
        reservation = f", up to near ties ({', '.join(blamed)})" if blamed else ""
        log.info("a token's logits are the same whatever shares its pass%s", reservation)

    @property
    def device(self) -> torch.device:
        """Device of the last stage."""
        return self._part.device

    @property
    def captured(self) -> bool:
        """Whether passes are padded to the buckets of captured graphs."""
        return self._part.captured

    @property
    def kernels(self) -> Choice:
        """The kernels that compute the linear layers."""
        return self._part.choice

    @property
    def weights(self) -> ServedWeights:
        """How those in the files of its configuration are stored, and how they are multiplied."""
        return served_weights(self._part.model, self.kernels, self._config)

    @property
    def stream_rows(self) -> StreamRows | None:
        """Computes streams in the target's passes; None: there are none."""
        return self._part.hidden_states.stream_rows

    @property
    def pool(self) -> KVPool:
        """The last stage's KV cache; those of the other stages hold the same requests."""
        return self._part.pool

    @property
    def adapters(self) -> dict[str, str]:
        """The digests of the adapters that requests may have, by name."""
        return self._adapters.digests

    def load_adapter(self, name: str, folder: Path) -> str:
        """Let requests have an adapter. May be called in any thread, while passes run. Returns its digest.

        Raises:
            ConfigurationError: it cannot be served; says why. No stage keeps it.
            InvalidArgument: another adapter has the name.
            TargetLost: a stage has died meanwhile.
        """
        return self._adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Drop an adapter, which no request may have.

        Raises:
            KeyError: there is none of the name.
        """
        self._adapters.unload(name)

    def open(
        self, request_id: str, rows: int, prefix: Prefix | None = None, *, sampling: Sampling | None = None, spare: int = 0
    ) -> bool:
        if self._has_states and self.blocks.owners >= state_slots(self._config):
            return False
        given = Prefix(tokens=()) if prefix is None else prefix
        tenant = None if prefix is None or not self._config.enable_prefix_caching else prefix.tenant
        digest = self.adapters[given.adapter] if given.adapter else ""
        shared = self.blocks.open(
            request_id, rows, given.tokens, tenant, spare=-(-spare // BLOCK), salt=given.salt, adapter=digest
        )
        if shared is None:
            return False
        blocks = self.blocks.blocks_of(request_id)
        self._part.memory.assign(request_id, blocks, len(blocks) - shared)
        self._earlier.open(request_id, shared, blocks)
        if (kept := self.blocks.state_at_start(request_id)) is not None:
            self._part.memory.load_state(request_id, shared * BLOCK, kept)
            self._earlier.load_state(request_id, shared * BLOCK, kept)
        self._adapters.assign(request_id, given.adapter)
        if tenant is not None:
            self._tokens[request_id] = list(given.tokens[: shared * BLOCK])
        self._chooser.open(request_id, sampling, given.tokens)
        return True

    def grow(self, request_id: str, rows: int) -> int:
        taken = self.blocks.grow(request_id, rows)
        if taken:
            self._part.memory.assign(request_id, taken, len(taken))
            self._earlier.grow(request_id, taken)
        return 0 if taken is None else BLOCK * len(self.blocks.blocks_of(request_id))

    def computed(self, request_id: str) -> int:
        return len(self._tokens.get(request_id, ()))

    def close(self, request_id: str) -> None:
        self.blocks.release(request_id)
        self._part.memory.forget(request_id)
        self._adapters.forget(request_id)
        self._tokens.pop(request_id, None)
        self._rows.pop(request_id, None)
        self._chooser.close(request_id)
        self._earlier.close(request_id)

    def forget(self, tenant: str) -> None:
        self.blocks.forget(tenant)

    def note_digest(self, digest: str) -> None:
        """Note the digest of every byte of the files that were read, which may be touched from now on."""
        self._files = self._files.noted(Path(self._config.model_path), digest)

    def new_weights(self, config: TargetConfig) -> NewWeights:
        """Load the weights in the folder of ``config``, in any thread, while these serve.

        Raises:
            ConfigurationError: they cannot take the place of these; says why.
        """
        folder, own = Path(config.model_path), self._config
        self._adapters.check(folder)
        read = partial(weights_of_part, own, self._part, own.stages - 1, self._means, folder, copies=own.processes_here)
        return self._earlier.load_weights(folder, read)

    def exchange(self, weights: NewWeights) -> None:
        """Compute by other weights from now on; the same again is the way back. No request may hold anything here.

        Raises:
            TargetLost: it will, once it is recovered: other processes do not.
        """
        weights.exchange()
        served = self._config.model_path, self._files
        folder, self._files = weights.idle
        self._config, weights.idle = replace(self._config, model_path=folder), served
        self._adapters.base = Path(folder)
        self.blocks.forget_all()
        try:
            self._earlier.exchange(weights, self._part)
        except TargetLost:
            raise
        except Exception as error:
            # This process has exchanged its own. Whoever hears another error takes it that nothing has changed.
            raise TargetLost(f"weights were not exchanged by all processes of the target: {error}") from error

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None:
        # What measures passes says that a context is there which was never computed: no rows are kept then.
        self._keep(request_id, context, rows, self._rows[request_id].tokens if rows else ())

    def keep_singles(self, batch: SingleRows) -> None:
        for request_id, context, token in zip(batch.request_ids, batch.contexts, batch.tokens, strict=True):
            self._keep(request_id, context, (0,), (token,))

    def keep_paths(self, batch: ColumnRows, paths: Sequence[Sequence[int]]) -> None:
        first, tokens = 0, batch.tokens
        for request_id, context, count, path in zip(batch.request_ids, batch.contexts, sizes_of(batch), paths, strict=True):
            self._keep(request_id, context, (0, *[1 + node for node in path]), tokens[first : first + count])
            first += count

    def _keep(self, request_id: str, context: int, rows: Sequence[int], computed: Sequence[int]) -> None:
        """Keep ``rows`` of those that a pass has computed of a request."""
        self._part.memory.keep(request_id, context, rows)
        self._earlier.keep(request_id, context, rows)
        tokens = self._tokens.get(request_id)
        if tokens is None and not self._chooser.follows(request_id):
            return
        kept = [computed[row] for row in rows]
        self._chooser.commit(request_id, context, kept)
        if tokens is not None:
            tokens += kept
            self.blocks.seal(request_id, tokens)

    def begin(self, batch: Sequence[Rows], *, whole: bool = False) -> None:
        """As ``Target.begin``; ``whole``: whole rows are needed, whatever the choices need."""
        sought = WHOLE_ROWS if whole or self._part.best is None else self._chooser.sought(batch)
        if self._has_states:
            self._save_states(batch)
        self._earlier.begin(batch, sought)
        self._under_way.append((batch, sought))
        if not isinstance(batch, SingleRows):
            self._rows.update((rows.request_id, rows) for rows in batch)

    def _save_states(self, batch: Sequence[Rows]) -> None:
        for rows in batch:
            for length, kept in self.blocks.save_states(rows.request_id, rows.context + rows.chain):
                self._part.memory.save_state(rows.request_id, length, kept)
                self._earlier.save_state(rows.request_id, length, kept)

    def finish(self) -> Sequence[Outcome]:
        batch, _ = self._under_way[0]
        logits = self.end_pass()
        start = time.perf_counter()
        sent = None if self._part.likeliest is None else Timed(self._part.likeliest)
        try:
            if self._part.best is not None and (found := self._part.best.found) is not None:
                return self._chooser.outcomes_of_parts(batch, found)
            return self._chooser.outcomes(batch, logits, sent)
        finally:
            # What is waited for is the pass itself. One that was launched on a device is not told from its choices.
            waits = self.device.type == "cuda" and sent is None and self._part.best is None
            self.choosing_s = 0.0 if waits else time.perf_counter() - start - (sent.seconds if sent else 0.0)

    def end_pass(self) -> torch.Tensor:
        """The oldest pass's logits, on the last stage's device: [rows read, vocabulary], float32.

        Where ranks share them, and they need not be whole (``begin``), those of a part of the vocabulary.
        """
        batch, sought = self._under_way.popleft()
        part = self._part
        try:
            try:
                # While the stage before still computes.
                part.prepare(batch)
            finally:
                entering = self._earlier.finish(part)
            return part.run(batch, *entering, sought=sought)
        except OutriderError:
            raise
        except Exception as error:
            if part.shards is None:
                raise
            # The other ranks wait within the pass.
            raise TargetLost(f"a pass failed in the verifier's rank of the target: {error}") from error

    def check_layers(self, layers: Sequence[int]) -> None:
        self._part.hidden_states.check(layers)

    def streams(self, layers: Sequence[int]) -> StreamSpec | None:
        return self._part.hidden_states.streams(layers)

    def fetch_features(self, asked: Mapping[str, Sequence[int]]) -> None:
        self._part.hidden_states.fetch([(self._rows[request_id], rows) for request_id, rows in asked.items()])

    def features(self, request_id: str, rows: Sequence[int]) -> Features:
        return self._part.hidden_states.features(self._rows[request_id], rows)

    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]:
        """A whole pass. Returns the logits of each entry: [``read``, vocabulary], float32, on the CPU."""
        self.begin(batch, whole=True)
        return list(torch.split(self.end_pass().cpu(), [rows.read for rows in batch]))

    def beat(self) -> None:
        self._earlier.beat(self._part)

    def recover(self) -> None:
        self.shutdown()
        self._under_way.clear()
        self._tokens.clear()
        self._rows.clear()
        with self._adapters.rebuilding():
            self._build(self._part)

    def shutdown(self) -> None:
        self._earlier.stop()
