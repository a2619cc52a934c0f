"""Chooses what computes linear layers, norms and gates on a GPU: the fastest exact kernels, by measurement.

Candidates are our Triton kernels, whose sums are cut by definition (``triton``), and cuBLASLt kept from splitting sums
(``cublaslt``); norms and gates are Triton's in both. Each is timed for every shape of layer and checked: a row's bits must
not depend on the other rows, nor, where ranks share a layer, a column's on the other columns. torch's own layers are not
exact; they are timed for comparison, and serve where nothing else can. Weights of eight bits are multiplied by our Triton
kernels alone, or by torchao's where these do not run. All processes of a target choose the same.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from services.machine.captured import captured
from services.model_files.weights.rounded_inputs import InputRounding, round_by
from services.verifier.checks.kept_measurements import Kept, digest_of
from services.verifier.config import Dtype, TargetConfig
from services.verifier.kernels.cpu_choice import Choice, clearly_fastest
from services.verifier.kernels.linears import as_linears, products, quantize
from services.verifier.kernels.padded_linear import PaddedLinear, forbid_split_sums
from services.verifier.kernels.shard_check import MakeLayer, compared_rows, sharded_products, unequal_shard
from services.verifier.kernels.shared_products import joint_layer, replace_by
from services.verifier.kernels.tied_layers import TiedLayers
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

ROWS = (1, 16, 64, 256)
# Number of layers by (outputs, inputs); layers that share a product count as one.
Shapes = Mapping[tuple[int, int], int]
Timer = Callable[[Callable[[], object]], float]
# Takes what this process has found and how all that was found makes a decision; gives the one that all processes take.
Settle = Callable[[str, Callable[[Sequence[str]], str]], str]

# Of what our kernels for GPUs compute (docs/gpu-kernels.md, "What is definition"): another number with each change of it, so
# that no answer goes on at a verifier with other bits.
DEFINITION = 3
_FORMAT = 3
_REPEATS = 5
# Rows beside which a row must have the bits that it has alone: around the sizes at which kernels change, and of prompts.
_COMPARED = (1, 3, 16, 17, 33, 64, 65, 130, 320, 2048)
# Several copies of a smaller layer take turns, so that a GPU's cache (50 MB in an H100) does not hold them.
_BEYOND_CACHE = 2**27


def alone(own: str, decide: Callable[[Sequence[str]], str]) -> str:
    """Settles for a single process."""
    return decide([own])


def triton_refusal(
    device: torch.device,
    *,
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
    find: Callable[[str], object] = find_spec,
) -> str:
    """Why our Triton row kernels do not run on a device; empty if a trial does.

    Args:
        capability_of: a GPU's compute capability.
        find: finds an installed package, or gives None.
    """
    if find("triton") is None:
        return "triton is not installed"
    if device.type != "cuda":
        return f"the device is {device.type}: must be a GPU"
    from services.verifier.kernels.triton.tree_pass import too_old

    return too_old(capability_of(device)) or _trial(device)


def _trial(device: torch.device) -> str:
    from services.verifier.kernels.triton.row_products import RowLinear, gated, normalise

    rows = torch.zeros(3, 64, dtype=torch.bfloat16, device=device)
    try:
        made = RowLinear(torch.zeros(64, 64, dtype=torch.bfloat16, device=device))(rows)
        # Copied, so that failures on the GPU show here.
        gated(normalise(made, None, made[0], 1e-6)[0]).cpu()
    except Exception as error:
        # Compilers and drivers may fail in any way.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def put(
    model: nn.Module, linears: str, device: torch.device, make: MakeLayer | None = None, dtype: Dtype = "bfloat16"
) -> None:
    """Replace a model's layers by those of the candidate ``linears``; norms, gates and experts as well where Triton runs.

    What enters layers of checkpoints that round it is rounded in float32, by our kernel or by torch, to the same bits.

    Args:
        make: makes a layer; None: as ``maker_of`` the candidate.
        dtype: of weights.
    """
    # Our kernels take its place where they come.
    round_by(model, InputRounding.in_float32)
    if linears == "torch":
        return
    make = make or maker_of(linears, dtype)
    if linears == "triton" or not triton_refusal(device):
        from services.verifier.kernels.triton.row_layers import use_row_kernels

        form = dtype if dtype == "int8" or dtype == "fp8" else None
        if left := use_row_kernels(model, make, form):
            log.info("layers that torch computes: %s", ", ".join(left))
        return
    tied = TiedLayers(model)
    for parent, layers in products(model):
        linear = [layer for layer in layers.values() if isinstance(layer, nn.Linear)]
        replace_by(tied.made(linear, partial(joint_layer, make, linear)), parent, layers)


def maker_of(linears: str, dtype: Dtype) -> MakeLayer:
    """Makes a linear layer of the candidate ``linears``, which rounds its weights to int8 or fp8 if ``dtype`` is that."""
    if linears == "cublaslt":
        return PaddedLinear
    if linears == "torch":
        return _plain
    from services.verifier.kernels.triton.byte_linear import ByteLinear
    from services.verifier.kernels.triton.row_products import RowLinear

    if dtype == "int8" or dtype == "fp8":
        return partial(ByteLinear, form=dtype)
    return RowLinear


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def triton_version() -> str:
    """Triton's version, as it says itself, since it is installed under several names; empty where there is none."""
    if find_spec("triton") is None:
        return ""
    import triton

    return str(triton.__version__)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelContest:
    """How the candidates are made and compared.

    Attributes:
        refusal, maker_of, triton_version: see the functions of these names.
        prepare: sets up the process before the first product of cuBLASLt.
        beyond_cache: bytes of weights that no GPU's cache holds; copies of a smaller layer take turns.
    """

    refusal: Callable[[torch.device], str] = triton_refusal
    maker_of: Callable[[str, Dtype], MakeLayer] = maker_of
    prepare: Callable[[], None] = forbid_split_sums
    beyond_cache: int = _BEYOND_CACHE
    triton_version: Callable[[], str] = triton_version


CONTEST = KernelContest()


def use_gpu_kernels(
    model: nn.Module, config: TargetConfig, settle: Settle = alone, contest: KernelContest = CONTEST
) -> Choice:
    """Replace the layers of a model that is to move to a GPU, as the settings say; returns by which.

    Raises:
        ConfigurationError: the kernels named in the settings cannot compute this model here, or none that its ranks may use;
            says why.
    """
    reason = _unfit(config, contest)
    if config.kernels == "torch" or reason:
        if config.kernels not in ("auto", "torch"):
            raise ConfigurationError(f"{reason}; use auto or torch", field="verifier.kernels", value=config.kernels)
        choice = Choice(linears="torch", reason=reason or "as configured")
    else:
        as_linears(model)
        choice = choose_gpu_kernels(model, config, milliseconds_on(torch.device(config.device)), contest, settle)
    use_choice(model, config, choice)
    return choice


def use_choice(model: nn.Module, config: TargetConfig, choice: Choice) -> None:
    """Replace the layers of a model by those of a choice.

    Raises:
        ConfigurationError: ranks may not share layers of it.
    """
    log.info("linear layers by %s: %s", choice.linears, choice.reason)
    if choice.linears == "torch" and config.tensor_parallel_size > 1:
        raise ConfigurationError(
            f"no kernels that ranks may share layers by run here: {choice.reason}",
            field="verifier.tensor_parallel_size",
            value=config.tensor_parallel_size,
        )
    if choice.linears == "torch" and config.quantised:
        quantize(model, config)
    put(model, choice.linears, torch.device(config.device), dtype=config.dtype)


def _unfit(config: TargetConfig, contest: KernelContest) -> str:
    """Why no kernels but torch's can compute a model under these settings; empty if some can."""
    if config.dtype == "float32" or (config.quantised and config.kernels == "cublaslt"):
        more = "" if config.kernels == "cublaslt" else ", int8 or fp8"
        return f"verifier.dtype is {config.dtype}: must be bfloat16{more}"
    # Of weights of eight bits there are no others' kernels to be compared with.
    return contest.refusal(torch.device(config.device)) if config.quantised and config.kernels == "auto" else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundKernels:
    """What a process has measured, by candidate.

    Attributes:
        exact: those whose rows do not depend on others.
        milliseconds: see ``Choice``; torch's layers, too.
    """

    exact: Sequence[str]
    milliseconds: Mapping[str, Sequence[float]]


def choose_gpu_kernels(
    model: nn.Module, config: TargetConfig, timer: Timer, contest: KernelContest = CONTEST, settle: Settle = alone
) -> Choice:
    """The fastest exact candidate for all of a target's processes, by measurements of an earlier start or anew.

    Whether columns of ranks are exact is asked at every start.

    Raises:
        ConfigurationError: the one named in the settings does not run here, or is not exact; says why.
    """
    device = torch.device(config.device)
    refused = contest.refusal(device)
    if config.kernels == "triton" and refused:
        raise ConfigurationError(f"{refused}; use auto, cublaslt or torch", field="verifier.kernels", value="triton")
    if config.tensor_parallel_size > 1 and refused:
        raise ConfigurationError(
            f"our Triton kernels, which ranks need between products, do not run: {refused}",
            field="verifier.tensor_parallel_size",
            value=config.tensor_parallel_size,
        )
    named = _candidates(config, refused)
    if named != ["triton"]:
        contest.prepare()
    shapes = _shapes(model)
    kept = Kept(config.kernels_dir, _about(config, shapes, device, contest))
    found = kept.read(lambda content: FoundKernels(**content))
    if found is None or not found.milliseconds.keys() >= set(named):
        found = _measured(named, shapes, config, timer, contest)
        kept.write(asdict(found))
    exact, reason = [name for name in named if name in found.exact], _reason(named, found)
    if "cublaslt" in exact:
        make = contest.maker_of("cublaslt", config.dtype)
        if unequal := unequal_shard(sharded_products(model), make, compared_rows(config), device):
            exact.remove("cublaslt")
            reason += f"; cublaslt gives a rank's columns other bits than the whole product's ({unequal})"
    if refused and config.kernels == "auto":
        reason += f"; triton does not run: {refused}"
    best = _settled(named, FoundKernels(exact=exact, milliseconds=found.milliseconds), config, settle)
    if best not in exact and (best != "torch" or config.kernels != "auto"):
        said = f"{best} is not exact here ({reason}); use auto or torch"
        raise ConfigurationError(said, field="verifier.kernels", value=config.kernels)
    figures = {name: [round(value, 3) for value in values] for name, values in found.milliseconds.items()}
    return Choice(linears=best, milliseconds=figures, reason=reason)


def _settled(named: Sequence[str], found: FoundKernels, config: TargetConfig, settle: Settle) -> str:
    """The one that is named, or that all processes of the target take."""

    def decide(told: Sequence[str]) -> str:
        everywhere = [FoundKernels(**json.loads(text)) for text in told]
        exact = [name for name in named if all(name in each.exact for each in everywhere)]
        taken = {name: zip(*(each.milliseconds[name] for each in everywhere), strict=True) for name in exact}
        return clearly_fastest(exact, {name: list(map(sum, each)) for name, each in taken.items()}) if exact else "torch"

    return settle(json.dumps(asdict(found)), decide) if config.kernels == "auto" else config.kernels


def _candidates(config: TargetConfig, refused: str) -> list[str]:
    if config.quantised:
        return ["triton"]
    if config.kernels != "auto":
        return [config.kernels]
    return ["cublaslt"] if refused else ["cublaslt", "triton"]


def _measured(
    named: Sequence[str], shapes: Shapes, config: TargetConfig, timer: Timer, contest: KernelContest
) -> FoundKernels:
    device = torch.device(config.device)
    totals = {name: [0.0] * len(ROWS) for name in (*named, "torch")}
    inexact: set[str] = set()
    for (outputs, inputs), count in shapes.items():
        copies = 1 + contest.beyond_cache // (2 * outputs * inputs)
        weights = [torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) for _ in range(copies)]
        for name, milliseconds in totals.items():
            layers = [contest.maker_of(name, config.dtype)(weight, None) for weight in weights]
            if name != "torch" and not is_exact_layer(layers[0], inputs, device):
                inexact.add(name)
            for index, rows in enumerate(ROWS):
                given = torch.randn(rows, inputs, device=device, dtype=torch.float32).bfloat16()
                milliseconds[index] += count / copies * timer(lambda: [layer(given) for layer in layers])  # noqa: B023
    return FoundKernels(exact=[name for name in named if name not in inexact], milliseconds=totals)


def _reason(named: Sequence[str], found: FoundKernels) -> str:
    listed = "; ".join(f"{name} {'/'.join(f'{value:.2f}' for value in each)}" for name, each in found.milliseconds.items())
    inexact = sorted(set(named) - set(found.exact))
    reason = f"ms over {'/'.join(map(str, ROWS))} rows: {listed}"
    return reason + (f"; not exact here: {', '.join(inexact)}" if inexact else "")


def is_exact_layer(layer: nn.Module, inputs: int, device: torch.device) -> bool:
    """Whether a row gets the same bits beside any number of others, at any place among them."""
    rows = torch.randn(max(_COMPARED) + 5, inputs, device=device, dtype=torch.float32).bfloat16()
    together = layer(rows)
    return all(
        torch.equal(layer(rows[start : start + count]), together[start : start + count])
        for count in _COMPARED
        for start in (0, 5)
    )


def _shapes(model: nn.Module) -> Shapes:
    layers = [list(layers.values()) for _, layers in products(model)]
    return Counter((sum(one.out_features for one in some), some[0].in_features) for some in layers)


def milliseconds_on(device: torch.device) -> Timer:
    """Measures on a device: a median, or on a CPU the shortest time, in milliseconds.

    On a GPU of replays, as passes are replayed: launched one by one, small layers would be timed by the host's work.
    """

    def on_gpu(run: Callable[[], object]) -> float:
        graph, _ = captured(run)
        graph.replay()
        found: list[float] = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(device)
            found.append(begin.elapsed_time(end))
        return statistics.median(found)

    def on_host(run: Callable[[], object]) -> float:
        best = math.inf
        for _ in range(1 + _REPEATS):
            start = time.perf_counter()
            run()
            best = min(best, 1e3 * (time.perf_counter() - start))
        return best

    return on_gpu if device.type == "cuda" else on_host


def _about(config: TargetConfig, shapes: Shapes, device: torch.device, contest: KernelContest) -> dict[str, Any]:
    """Everything that the choice depends on."""
    return {
        "format": _FORMAT,
        "model": digest_of(config.model_path),
        "shapes": sorted([*shape, count] for shape, count in shapes.items()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "triton": contest.triton_version(),
        "kernels": [config.kernels, config.dtype],
    }
