"""Answers of quantised checkpoints: every format says through a whole service what its float model says, under drafts, of a given
form, and where another verifier goes on in mid-answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink
from tests.drafters.draft_links import linked
from tests.engine.fakes import PLAIN
from tests.engine.layouts import in_one_process
from tests.lossless.architectures import GuidedDrafter
from tests.lossless.test_hybrids_are_lossless import BLEND, GUIDED, PROMPTS, SAMPLING, formed, said, verifier
from tests.tiny_models.gpt_oss import make_gpt_oss
from tests.tiny_models.quantised import FORMS, make_float_model, quantise

# Each on one link, greedily or sampled.
SERVED = (
    "awq", "fp8_blocks_of_128", "gpt_oss", "compressed_w4_zeros", "compressed_nvfp4", "bnb_nf4", "hqq_4_bits", "gptq", "bnb_int8",
    "gptq_ordered",
)  # fmt: skip
CASES = [(form, "grpc" if at % 2 else "in_process", at % 2) for at, form in enumerate(SERVED)]


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_float_model(tmp_path_factory.mktemp("float"))


@pytest.mark.examples(3)
@pytest.mark.parametrize(("form", "link", "sampling"), CASES)
async def test_they_are_those_of_the_float_model(
    form: str, link: str, sampling: int, float_model: Path, tmp_path: Path
) -> None:
    folder, plain = (
        make_gpt_oss(float_model, tmp_path) if form == "gpt_oss" else quantise(float_model, tmp_path, FORMS[form])
    )
    asked, own = SAMPLING[sampling], InProcessDraftLink(DrafterService(DrafterConfig()))
    with in_one_process():
        async with verifier(plain, own) as running:
            wanted = await said(running, PLAIN, asked)
            in_form, _ = await formed(running, "json", PLAIN, asked)
    async with linked(DrafterService(DrafterConfig()), link) as drafts, verifier(folder, drafts) as running:
        for plan in (PLAIN, BLEND):
            assert await said(running, plan, asked) == wanted
        assert (await formed(running, "json", BLEND, asked))[0] == in_form
    whole = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, wanted, strict=True)]
    async with linked(GuidedDrafter(300, whole), link) as drafts, verifier(folder, drafts) as running:
        assert await said(running, GUIDED, asked) == wanted
        assert running.loop.stats.accepted_by_source["guided"] > 10
        half = [answer[:11] for answer in wanted]
        assert await said(running, GUIDED, asked, committed=half) == [answer[11:] for answer in wanted]
