"""Rows of a mask embedding see what they may see, and their guesses are counted at the right tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.probe_rows import embeddings_of, guesses_of, mask_logits
from benchmarks.replay import Trace


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    return loaded.eval()


def test_each_anchors_rows_are_those_of_a_pass_of_its_own(model: PreTrainedModel) -> None:
    tokens, ahead = torch.tensor([5, 9, 3, 77, 12, 8]), 2
    mask = embeddings_of(model, tokens[:3])["mean of the prompt's"]
    found = mask_logits(model, tokens, mask, ahead)
    for anchor in range(len(tokens)):
        text = model.get_input_embeddings()(tokens[: anchor + 1])
        with torch.inference_mode():
            alone = model(inputs_embeds=torch.cat((text, mask.expand(ahead, -1)))[None]).logits[0, -ahead:]
        torch.testing.assert_close(found[anchor], alone, rtol=1e-4, atol=1e-4)


def test_guesses_are_judged_by_the_token_that_came(model: PreTrainedModel) -> None:
    prompt, answer = (5, 9, 3), [77, 12, 8, 4, 31]
    tokens = torch.tensor([*prompt, *answer])
    mask = embeddings_of(model, torch.tensor(prompt))["mean of all"]
    likely = mask_logits(model, tokens, mask, 2).argmax(-1)
    # Behind the prompt, the first row guesses the answer's second token, and the second row its third.
    right = [sum(int(likely[2 + n, place] == answer[n + place + 1]) for n in range(4 - place)) for place in range(2)]
    found = guesses_of(model, [Trace(prompt=prompt, output=tuple(answer), task="t")], 2)["mean of all"]
    assert [(each.judged, each.right) for each in found] == [(4, right[0]), (3, right[1])]
    assert all(each.right <= each.among <= each.judged for each in found)
    # An answer whose second token is what the first row guesses.
    guessed = int(mask_logits(model, torch.tensor(prompt), mask, 1)[-1, 0].argmax())
    (again,) = guesses_of(model, [Trace(prompt=prompt, output=(77, guessed), task="t")], 1)["mean of all"]
    assert (again.judged, again.right, again.among) == (1, 1, 1)
