"""Our kernels one by one: any shape, any form of weights, the same bits on every instruction set that is here.

What a whole target computes with them is checked in tests/lossless.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.machine.compiling import check_runs, private_folder
from services.model_files.weights.quantised.as_blocks import as_blocks, codes_as_blocks, floats_as_blocks
from services.model_files.weights.stored_blocks import KEPT, TABLES, StoredBlocks, Weight, quantized, scales_of, sizes_of
from services.verifier.attention.calls import Bias, Call
from services.verifier.attention.tiled import TiledPass
from services.verifier.kernels.native import library as compiling
from services.verifier.kernels.native.attention_kernel import kernel_for, lay_out
from services.verifier.kernels.native.library import Library, library, ship
from services.verifier.kernels.native.linear_kernel import NativeLinear
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows
from tests.kernels.kernels_here import SETS, all_here, kernels_of
from tests.tiny_models.random_blocks import random_blocks

FORMS = ("float32", "bfloat16", "Q8_Z", "Q4_Z", "Q4_H", "E4M3", *TABLES, *KEPT)


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Library:
    return kernels_of(request.param)


def stored(form: str, outputs: int, inputs: int) -> Weight:
    """Random weights; a quantised form's bits are random, too."""
    weight = torch.randn(outputs, inputs)
    if form in ("float32", "bfloat16"):
        return weight.to(getattr(torch, form))
    if form == "Q8_0":
        return quantized(weight)
    if form in KEPT and form not in ("Q4_0", "Q4_1"):
        return StoredBlocks(torch.from_numpy(random_blocks(outputs, inputs, form, seed=inputs)), form, inputs)
    source = np.random.default_rng(outputs * inputs)
    if form == "E4M3":
        codes = torch.from_numpy(source.integers(0, 256, (outputs, inputs), dtype=np.uint8))
        codes[(codes & 127) == 127] = 128
        made = floats_as_blocks(codes.view(torch.float8_e4m3fn), torch.randn(outputs, inputs // 32), 32)
        assert made is not None
        return made
    if form in TABLES:
        codes = torch.from_numpy(source.integers(0, 16, (outputs, inputs), dtype=np.uint8))
        return codes_as_blocks(form, codes, torch.randn(outputs, inputs // 32 * scales_of(form)))
    if form == "Q4_H":
        zeros, halves = torch.randint(0, 16, (outputs, inputs // 16)), torch.randn(outputs, inputs // 16).half()
        made = as_blocks(torch.randint(0, 16, (outputs, inputs)), zeros, halves, 16)
        assert made is not None and made.kind == form
        return made
    scales = source.uniform(-2, 2, (outputs, inputs // 32, 1 if form == "Q4_0" else 2)).astype(np.float16)
    if form.endswith("Z"):
        # Zero points: whole ones, and others whose difference from every number is exact.
        zeros = source.uniform(0, 16, scales.shape[:2]).astype(np.float16)
        scales[..., 1] = np.where(source.random(scales.shape[:2]) < 0.5, zeros.round(), (zeros * 64).round() / 64)
    scales = scales.view(np.uint8)
    numbers = source.integers(0, 256, (outputs, inputs // 32, 32 if form == "Q8_Z" else 16), dtype=np.uint8)
    raw = np.concatenate([scales, numbers], axis=-1).reshape(outputs, -1)
    return StoredBlocks(torch.from_numpy(raw), form, inputs)


def in_groups(form: str) -> bool:
    """Whether a type has blocks of 256 inputs."""
    return form in KEPT and sizes_of(form)[0] > 32


def in_order(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The law: [rows, inputs] times [outputs, inputs], one fused multiply-add after the other, in the order of the inputs."""
    # A product of two floats is exact in double precision, and adding a float to it rounds once more but in ties.
    sums = torch.zeros(len(given), len(weight), dtype=torch.float32)
    for k in range(given.shape[1]):
        product = given[:, k : k + 1].double() * weight[None, :, k].double()
        sums = (product + sums.double()).float()
    return sums


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C compiler found"), ("false", "false failed")])
def test_a_compiler_that_is_missing_or_fails(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.__wrapped__("auto") is None
    assert reason in caplog.text
    monkeypatch.setattr(compiling, "library", lambda: None)
    assert reason in compiling.why_none() and "\n" not in compiling.why_none()


def test_a_process_without_torch_does_not_say_that_there_are_none() -> None:
    """`outrider serve` on Ray is one: it said so on every machine, where the demo expects an address."""
    program = "import sys; from services.verifier.kernels.native.library import why_none; print([why_none()], 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[4]
    )
    assert done.stdout == "[''] False\n"


@pytest.mark.parametrize(
    ("body", "reason"), [("__builtin_trap(); return 1;", "exit status -"), ("return 0;", "exit status 9")]
)
def test_what_does_not_run_here_is_never_loaded(body: str, reason: str, tmp_path: Path) -> None:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler here")
    (tmp_path / "bad.c").write_text(f"int outrider_check(void) {{ {body} }}")
    made = tmp_path / "bad.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(tmp_path / "bad.c"), "-o", str(made)], check=True)
    with pytest.raises(OSError, match=f"processor .{reason}"):
        check_runs(made)


def test_what_was_compiled_is_kept_where_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = private_folder()
    assert folder is not None and folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    assert private_folder() is None
    assert "this user alone" in caplog.text


@pytest.mark.exhaustive
def test_shipped_kernels_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not all_here():
        pytest.skip("no C compiler, or no fitting processor, here")
    monkeypatch.setattr(compiling, "_SHIPPED", tmp_path / "shipped")
    files = ship()
    # Also for instruction sets that this processor lacks: others will run them.
    assert [file.name.partition("-")[0] for file in files] == [
        name for name in compiling._MACHINES if platform.machine() in compiling._MACHINES[name]
    ]
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = library.__wrapped__("auto")
    assert found is not None and found.digest in [file.stem for file in files]
    given, weight = torch.randn(5, 70), torch.randn(50, 70)
    own = NativeLinear(all_here()[0], weight, None)(given)
    assert torch.equal(NativeLinear(found, weight, None)(given), own)
    # Those of other sources are not taken.
    for file in files:
        file.rename(file.with_name(f"{file.stem[:-1]}x.so"))
    assert library.__wrapped__("auto") is None


@pytest.mark.parametrize("shape", [(32, 16), (50, 7), (1, 64), (300, 100), (70, 300)])
@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 40, 200])
def test_linear_layers_of_any_shape(kernels: Library, shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    weight, bias, given = torch.randn(*shape), torch.randn(shape[0]), torch.randn(3, rows, shape[1])
    layer = NativeLinear(kernels, weight, bias)
    result = layer(given)
    assert torch.allclose(result, given @ weight.T + bias, atol=1e-4)
    assert torch.equal(layer(given[1:2, -1:]), result[1:2, -1:])


@pytest.mark.examples(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 9, 30, 110])
def test_every_form_of_weights_is_its_float32_bit_for_bit(kernels: Library, form: str, rows: int) -> None:
    """Weights that stay as stored give the sums of the unpacked ones, in the order of the inputs."""
    torch.manual_seed(1)
    # A part of the inputs that is unpacked at once, and a shorter one behind; blocks of the K types have 256.
    inputs = 768 if in_groups(form) else 320
    weight = stored(form, 100, inputs)
    given = torch.randn(rows, inputs)
    result = NativeLinear(kernels, weight, None)(given)
    plain = weight.float()
    assert torch.equal(result, NativeLinear(kernels, plain, None)(given))
    assert torch.equal(result[:2], in_order(given[:2], plain))
    # The weights themselves.
    assert torch.equal(NativeLinear(kernels, weight, None)(torch.eye(inputs)[-rows:]), plain.T[-rows:])


def test_every_power_of_two_of_a_block(kernels: Library) -> None:
    """The smallest ones make numbers that floats hold with fewer bits, the greatest the greatest floats."""
    codes = torch.arange(16, dtype=torch.uint8)
    powers = torch.arange(253, dtype=torch.uint8)
    raw = torch.cat([powers[:, None], (codes | (codes.flip(0) << 4)).expand(253, 16)], 1)
    weight = StoredBlocks(raw, "MXFP4", 32)
    assert weight.finite() and weight.float()[0].any()
    assert torch.equal(NativeLinear(kernels, weight, None)(torch.eye(32)), weight.float().T)
    raw[0, 0] = 253
    assert not weight.finite()


def test_inputs_that_fill_no_block(kernels: Library) -> None:
    torch.manual_seed(2)
    weight, given = torch.randn(40, 50).bfloat16(), torch.randn(5, 50)
    assert torch.equal(NativeLinear(kernels, weight, None)(given), NativeLinear(kernels, weight.float(), None)(given))


def test_a_wrong_count_of_bytes_is_refused(kernels: Library) -> None:
    with pytest.raises(ValueError, match="blocks are"):
        NativeLinear(kernels, StoredBlocks(torch.zeros(4, 19, dtype=torch.uint8), "Q4_1", 32), None)


@pytest.mark.parametrize("form", FORMS)
def test_linear_layers_are_the_same_bits_on_every_instruction_set(form: str) -> None:
    torch.manual_seed(3)
    inputs = 512 if in_groups(form) else 384
    weight, bias = stored(form, 70, inputs), torch.randn(70)
    for rows in (1, 2, 3, 6, 8, 17, 100):
        given = torch.randn(rows, inputs)
        results = [NativeLinear(kernels, weight, bias)(given) for kernels in all_here()]
        assert all(torch.equal(result, results[0]) for result in results)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "chunks": {"chunk": 20},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "bias": {"bias": Bias(table=torch.linspace(0, 9, 400).view(4, 100))},
    "bias by distance": {"bias": Bias(table=-torch.linspace(0, 9, 400).view(4, 100), by_distance=True), "window": 50},
    "everything": {
        "chunk": 30,
        "softcap": 2.0,
        "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0]),
        "bias": Bias(table=torch.linspace(0, 9, 400).view(4, 100)),
    },
}


@pytest.mark.parametrize("value_size", [32, 16, 48])
@pytest.mark.parametrize("kind", list(CALLS))
def test_attention_is_the_same_bits_on_every_instruction_set(kind: str, value_size: int) -> None:
    rows = 90
    call = Call(entry=0, heads=4, kv_heads=2, key_size=32, value_size=value_size, scale=32**-0.5, **CALLS[kind])
    torch.manual_seed(4)
    query, key, value = torch.randn(4, rows + 6, 32), torch.randn(2, rows + 6, 32), torch.randn(2, rows + 6, value_size)
    parents = (-1, -1, 0, 2, 1, 4)
    batch = [Rows(request_id="a", context=0, tokens=(0,) * (rows + 6), parents=parents, logits=1)]
    results = []
    for kernels in (*all_here(), None):
        pool = KVPool([call], rows=256, dtype=torch.float32, device=torch.device("cpu"))
        pool.assign("a", [1, 0, 2], 3)
        kernel = kernel_for(kernels, pool)
        assert (kernel is None) == (kernels is None)
        laid_out = TiledPass(pool, batch, 0) if kernel is None else lay_out(kernel, pool, batch, 0)
        results.append(laid_out.attend(call, query, key, value))
    *native, tiled = results
    assert all(torch.equal(result, native[0]) for result in native)
    assert all(torch.allclose(result, tiled, atol=2e-5) for result in native)


def printed_by(command: list[str], flags: tuple[str, ...], folder: Path, run: list[str]) -> list[str]:
    """What tests/unit/verifier/kernels/native_bits.c prints, compiled with ``flags``."""
    sources = Path(compiling.__file__).parent
    files = [str(sources / name) for name in compiling._SOURCES if name != "layer.c"]
    made = str(folder / "bits")
    program = str(Path(__file__).with_name("native_bits.c"))
    subprocess.run([*command, *compiling._FLAGS, *flags, f"-I{sources}", program, *files, "-o", made], check=True)
    return subprocess.run([*run, made], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.exhaustive
def test_neon_under_emulation_is_the_same_bits(tmp_path: Path) -> None:
    """Where a cross compiler and an emulator are installed (Debian: gcc-aarch64-linux-gnu, qemu-user)."""
    compiler, emulator, here = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64"), all_here()
    if compiler is None or emulator is None or not here or here[-1].name == "neon":
        pytest.skip("no cross compiler, emulator or other instruction set here")
    own = printed_by(["cc"], compiling._FLAGS_OF[here[-1].name], tmp_path, [])
    assert len(own) == 370 and own[0] == "check 1"
    assert printed_by([compiler, "-static"], (), tmp_path, [emulator]) == own
