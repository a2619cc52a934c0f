"""The semantic look-up: what followed the corpus positions whose hidden states are nearest to the text's.

Neighbours are searched over the target's own states, as in kNN-LM (Khandelwal et al., ICLR 2020), here only for drafting.
Entry ``i`` of the FAISS index is the normalised state of the target after token ``i``; a second file holds the tokens. Each
document is followed by the token ``END`` with a state of zeros, so that no continuation crosses into the next document.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval_index.manifest import END, STATES, TOKENS
from speculation.errors import ConfigurationError
from speculation.messages import Continuation

log = logging.getLogger(__name__)

# Limits from FAISS's guidelines: exact search below the first, inverted lists with one byte per number below the second,
# product quantisation above.
_EXACT_UP_TO = 20_000
_BYTES_UP_TO = 2_000_000
# Numbers of a state per codebook.
_PRODUCT = 8
_TRAINED_ON = 64
_PROBED = 16
_NEIGHBOURS = 64
_CHUNK = 65_536
# Bytes that FAISS may set aside on a GPU for its own work; its default would be 1.5 GiB.
_GPU_WORK_BYTES = 64 << 20


def kind_for(count: int, width: int) -> str:
    """FAISS's factory string for ``count`` states of ``width`` numbers."""
    if count < _EXACT_UP_TO:
        return "SQfp16"
    lists = int(4 * math.sqrt(count))
    if count < _BYTES_UP_TO or width % _PRODUCT:
        return f"IVF{lists},SQ8"
    return f"IVF{lists},PQ{width // _PRODUCT}x8"


def build(states: NDArray[np.float16], tokens: NDArray[np.uint32], folder: Path) -> None:
    """Write the index of ``states`` ([positions, width]) and ``tokens`` ([positions]) into ``folder``."""
    count, width = states.shape
    index = faiss.index_factory(width, kind_for(count, width), faiss.METRIC_INNER_PRODUCT)
    if isinstance(index, faiss.IndexIVFPQ):
        # FAISS would order each codebook for searches by Hamming distance, which takes two seconds; none is made here.
        index.do_polysemous_training = False  # type: ignore[attr-defined]
    lists = getattr(index, "nlist", 1)
    sample = np.random.default_rng(0).permutation(count)[: max(_EXACT_UP_TO, _TRAINED_ON * lists)]
    index.train(_normalised(states[np.sort(sample)]))
    for chunk in _chunks(states):
        index.add(_normalised(chunk))
    faiss.write_index(index, str(folder / STATES))
    tokens.astype("<u4").tofile(folder / TOKENS)


class StateIndex:
    """A built index. Inverted lists are mapped into memory, or copied to a GPU where FAISS sees one; an exact index is read.

    Attributes:
        width: numbers in a state.

    Raises:
        ConfigurationError: the files cannot be read, or do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._index = faiss.read_index(str(folder / STATES), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
            self._tokens: NDArray[np.uint32] = np.memmap(folder / TOKENS, dtype="<u4", mode="r")
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(f"cannot map the hidden states in {folder}: {error}", about=folder) from error
        if self._index.ntotal != len(self._tokens):
            raise ConfigurationError(
                f"{folder} has {self._index.ntotal} hidden states for {len(self._tokens)} tokens", about=folder
            )
        self.width: int = self._index.d
        if isinstance(self._index, faiss.IndexIVF):
            self._index.nprobe = _PROBED
            held = self._index.invlists
            lists = None if held is None else faiss.downcast_InvertedLists(held)
            if isinstance(lists, faiss.OnDiskInvertedLists):
                # FAISS's read-ahead threads would compete with the target's threads.
                lists.prefetch_nthread = 0
            self._resources, self._index = _on_gpu(self._index)

    def look_up(self, state: NDArray[np.float32], last: int, max_continuations: int, max_length: int) -> list[Continuation]:
        """What followed the positions whose states are nearest to ``state`` ([width]), nearest first.

        Args:
            last: the text's token after ``state``; positions that another token followed in the corpus are skipped.
        """
        # A search takes about a millisecond, and FAISS keeps this setting per thread.
        faiss.omp_set_num_threads(1)
        _, found = self._index.search(_normalised(state[None]), _NEIGHBOURS)
        return self._continuations(found[0], last, max_continuations, max_length)

    def _continuations(
        self, positions: NDArray[np.int64], last: int, max_continuations: int, max_length: int
    ) -> list[Continuation]:
        counted: dict[tuple[int, ...], int] = {}
        for position in positions:
            # FAISS fills missing results with -1.
            here = self._tokens[position : position + 2 + max_length] if position >= 0 else self._tokens[:0]
            if len(here) < 2 or here[0] == END or here[1] != last:
                continue
            following = here[2:]
            ends = np.flatnonzero(following == END)
            rest = tuple(following[: ends[0] if len(ends) else None].tolist())
            if rest:
                counted[rest] = counted.get(rest, 0) + 1
        found = list(counted.items())[:max_continuations]
        return [Continuation(tokens=rest, count=count, match_length=1) for rest, count in found]


def _on_gpu(index: Any) -> tuple[Any, Any]:
    """FAISS's resources, which must live as long, and the index on the first GPU that this process sees; else as it is.

    faiss-cpu sees none, nor does a process on Ray for which none is set aside (``retrieval.num_gpus``).
    """
    if not getattr(faiss, "get_num_gpus", int)():
        return None, index
    try:
        resources = faiss.StandardGpuResources()
        resources.setTempMemory(_GPU_WORK_BYTES)
        return resources, faiss.index_cpu_to_gpu(resources, 0, index)
    except RuntimeError as error:
        # Not every width is supported there, and memory may be short.
        log.warning("the index of hidden states stays on the processor: %s", " ".join(str(error).split())[:300])
        return None, index


def _normalised(states: NDArray[np.float16] | NDArray[np.float32]) -> NDArray[np.float32]:
    made = np.ascontiguousarray(states, dtype=np.float32)
    made /= np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)
    return made


def _chunks(states: NDArray[np.float16]) -> Iterator[NDArray[np.float16]]:
    for start in range(0, len(states), _CHUNK):
        yield states[start : start + _CHUNK]
