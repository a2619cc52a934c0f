"""The slower a model's passes, the more drafting counts? The same answers from the default model at the cost of larger ones.

    python -m lab.model_sizes [--sizes 0.1,1,7] [--minutes 10] [--strategy auto] [--tokens 32] [--into docs/benchmarks.md]

``benchmarks.inflate`` makes the default model as large as a model of one or of seven billion parameters, and it still says
the same. ``outrider bench`` then compares drafting with plain decoding, on three short prompts, since a large model reads
slowly. Sizes are measured from the smallest on, with bfloat16 weights; seven billion parameters need 15 GB of memory and of
disk. When the time is up, the run ends with what it has. The table is printed, and written into a page as a section.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.contestants import PLAIN
from benchmarks.bench.results import RESULTS, read_results
from benchmarks.bench.tables import Table, markdown, number, ratio
from benchmarks.inflate import inflate
from cluster.models.target import BUILT_IN, as_float32, resolve
from services.machine.processor import cache_folder, cores, processor
from services.verifier.kernels.native.library import instructions

HEADING = "## The same answers from slower models"
# One each of: much of the answer stands in the prompt, its parts resemble each other, nobody can guess it.
PROMPTS = {
    "edit": "Rename x to count and print the program again:\n\ndef next(x):\n    x = x + 1\n    print(x)\n    return x\n",
    "list": "Write the numbers from one to ten as words, one on each line.",
    "question": "Why is the sky blue?",
}
# Seconds in which a bench that is told to stop writes what it has.
_ENDS_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """To what a model is inflated."""

    width: int
    intermediate: int
    layers: int


# By billions of parameters: the default model's own shape, and larger ones, whose width its heads divide.
SHAPES = {
    "0.1": Shape(width=576, intermediate=1536, layers=30),
    "1": Shape(width=1728, intermediate=4608, layers=30),
    "7": Shape(width=4032, intermediate=14336, layers=32),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is measured of each size, and until when.

    Attributes:
        ends: as ``time.monotonic`` has it.
    """

    strategy: str
    tokens: int
    ends: float

    def measured(self, model: Path, folder: Path) -> dict[str, Any] | None:
        """The results of a bench of the model in a new folder; None: there was no time for one measurement.

        Raises:
            RuntimeError: it failed; says why.
        """
        prompts = folder.with_suffix(".jsonl")
        lines = [json.dumps({"category": task, "question_id": 1, "turns": [text]}) for task, text in PROMPTS.items()]
        prompts.write_text("\n".join(lines))
        command = [
            sys.executable, "-m", "cli", "bench", "--model", str(model), "--prompts", str(prompts), "--peers", "none",
            "--strategies", self.strategy, "--max-tokens", str(self.tokens), "--repeats", "2", "--timeout", "600",
            "--out", str(folder), "--set", "verifier.max_model_len=512", "--set", "verifier.kv_cache_tokens=4096",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as bench:
            try:
                said, _ = bench.communicate(timeout=max(1.0, self.ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                bench.send_signal(signal.SIGINT)
                try:
                    said, _ = bench.communicate(timeout=_ENDS_S)
                except subprocess.TimeoutExpired:
                    bench.kill()
                    return None
        if not (folder / RESULTS).is_file():
            if time.monotonic() >= self.ends:
                return None
            raise RuntimeError(said[-2000:])
        return read_results(folder)


def table(found: Mapping[str, Mapping[str, Any] | None], strategy: str) -> Table:
    """The results by size; None: none before the time was up."""
    return Table(
        title=f"Plain decoding and {strategy}, the same answers at the cost of larger models",
        columns=("parameters", "a plain pass", "tokens per pass", "gain", *PROMPTS, "answers that differ"),
        rows=tuple((f"{size} billion", *_row(results, strategy)) for size, results in found.items()),
    )


def _row(results: Mapping[str, Any] | None, strategy: str) -> Sequence[str]:
    by_name = {record["contestant"]: record for record in results["summary"]} if results is not None else {}
    if results is None or PLAIN not in by_name or strategy not in by_name:
        return ("no time", *["–"] * (len(PROMPTS) + 3))
    drafting = by_name[strategy]
    pass_s = by_name[PLAIN]["latency"]["itl_median_s"]
    tasks = [drafting["tasks"].get(task) for task in PROMPTS]
    checks = [check for check in results["lossless"]["checks"] if check["against"] == "plain"]
    return (
        f"{1000 * pass_s:.0f} ms",
        number(drafting["tau"], ".2f"),
        ratio(drafting["speed_up"][PLAIN]) if PLAIN in drafting["speed_up"] else "–",
        *(ratio(task["speed_up"]) if task is not None else "–" for task in tasks),
        str(sum(check["answers"] - check["equal"] for check in checks)),
    )


def section(made: Table, about: str) -> str:
    """The section of a page that has the table."""
    return f"{HEADING}\n\n{about}\n\n{markdown(made)}\n"


def put_into(page: str, made: str) -> str:
    """The page with the section in the place of an earlier one, or at its end."""
    start = re.search(rf"^{re.escape(HEADING)}$", page, re.MULTILINE)
    if start is None:
        return f"{page.rstrip()}\n\n{made}"
    after = re.search(r"^#{1,2} ", page[start.end() :], re.MULTILINE)
    rest = page[start.end() + after.start() :] if after else ""
    return page[: start.start()] + made + (f"\n{rest}" if rest else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SHAPES), help="billions of parameters, comma-separated")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all sizes together")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--tokens", type=int, default=32, help="most of an answer")
    parser.add_argument("--into", type=Path, help="page that gets the table as a section")
    arguments = parser.parse_args()
    sizes = arguments.sizes.split(",")
    if unknown := [size for size in sizes if size not in SHAPES]:
        parser.error(f"--sizes: there is no {unknown[0]}; there are {', '.join(SHAPES)}")
    bench = Bench(
        strategy=arguments.strategy,
        tokens=arguments.tokens,
        ends=time.monotonic() + 60 * arguments.minutes - _ENDS_S,
    )
    small = as_float32(resolve(BUILT_IN, cache_folder(), say=print).path)
    found: dict[str, dict[str, Any] | None] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="outrider-sizes-") as scratch:
            found[size] = _of_size(SHAPES[size], small, Path(scratch), bench)
    made = table(found, arguments.strategy)
    machine = f"{cores()} cores of an {processor()}, {instructions()}"
    about = (
        f"Written by `python -m lab.model_sizes --into` this page on {datetime.now(UTC):%Y-%m-%d}: {machine}, weights in\n"
        f"bfloat16, {len(PROMPTS)} prompts, answers of at most {arguments.tokens} tokens."
    )
    print(section(made, about))
    if arguments.into is not None:
        arguments.into.write_text(put_into(arguments.into.read_text(), section(made, about)))


def _of_size(shape: Shape, small: Path, scratch: Path, bench: Bench) -> dict[str, Any] | None:
    if time.monotonic() >= bench.ends:
        return None
    began = time.monotonic()
    model = scratch / "model"
    total = inflate(small, model, dtype=torch.bfloat16, **asdict(shape))
    print(f"{total / 1e9:.2f} billion parameters in {time.monotonic() - began:.0f} s", flush=True)
    results = bench.measured(model, scratch / "out")
    print(f"measured after {time.monotonic() - began:.0f} s", flush=True)
    return results


if __name__ == "__main__":
    main()
