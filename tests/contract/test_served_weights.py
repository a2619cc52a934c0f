"""Which numbers a served model has, as both doors and both links say it."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

import outrider
from cli.models_report import print_models
from cluster.settings.config import load
from outrider import Client
from speculation.messages import ServedWeights
from tests.kernels.kernels_here import needs_kernels
from tests.servers.http_service import http_served
from tests.servers.verifier_links import in_process, over_grpc
from tests.tiny_models.quantised import FORMS, ROUNDED, make_float_model, quantise

pytestmark = needs_kernels


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("gptq", ServedWeights(stored="GPTQ, 4 bits, groups of 32", multiplied=("Q4_0", "float32"), kernels="native")),
        (
            "fp8_block",
            ServedWeights(
                stored="compressed-tensors, floats of 8 bits with a scale for each block",
                multiplied=("E4M3", "float32"),
                kernels="native",
                rounded_inputs="floats of 8 bits with a scale for each 32 numbers of a row",
                rounded_cache="floats of 8 bits with a scale for each row and head",
            ),
        ),
        (
            "nvfp4",
            ServedWeights(
                stored="compressed-tensors, floats of 4 bits with a scale for each group of 16",
                multiplied=("E2M1", "float32"),
                kernels="native",
                rounded_inputs="floats of 4 bits with a scale in FP8 for each 16 numbers of a row",
            ),
        ),
    ],
)
def test_both_doors_say_them(form: str, weights: ServedWeights, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = FORMS.get(form) or ROUNDED[form]
    folder, _ = quantise(make_float_model(tmp_path / "float"), tmp_path, how)
    cache = "fp8" if weights.rounded_cache else "auto"
    with http_served(
        folder, "verifier.kernels=auto", "verifier.weights=auto", f"verifier.kv_cache_dtype={cache}"
    ) as service:
        (listed,) = httpx2.get(f"{service.url}/v1/models").json()["data"]
        with Client(service.grpc) as client:
            (model,) = client.models()

        async def over_links() -> list[ServedWeights]:
            found = []
            for connect in (in_process, over_grpc):
                async with connect(service.pipeline.verifier) as link:
                    found.append((await link.describe()).weights)
            return found

        assert service.run(over_links()) == [weights, weights]
    assert model.weights == outrider.ServedWeights(
        stored=weights.stored,
        multiplied=weights.multiplied,
        kernels=weights.kernels,
        rounded_inputs=weights.rounded_inputs,
        rounded_cache=weights.rounded_cache,
    )
    assert listed["weights"] == {
        "stored": weights.stored,
        "multiplied": list(weights.multiplied),
        "kernels": weights.kernels,
        "rounded_inputs": weights.rounded_inputs,
        "rounded_cache": weights.rounded_cache,
    }
    print_models("here", [model], load(environ={}), verbose=False, as_json=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"stored as {weights.stored}, multiplied as {', '.join(weights.multiplied)} by native kernels" in printed
