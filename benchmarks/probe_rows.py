"""What rows of a mask embedding guess, without any training (ESP's probe tokens): ``python -m benchmarks.probe_rows``.

Behind each token of answers that the target wrote, some rows carry one embedding in place of the tokens still to come. They
see the text up to there and each other, and their own next-token distributions are guesses of tokens further ahead. In a
service such rows would share the pass as probes do; what each one costs there, `python -m benchmarks.step_cost` says.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.replay import Trace, read_traces
from cluster.models import BUILT_IN, as_float32, resolve
from services.machine import cache_folder

_AMONG = 10


@dataclass(slots=True)
class Guesses:
    """Of one place ahead: how many were judged, how often the likeliest token was right, and how often it was among ten."""

    judged: int = 0
    right: int = 0
    among: int = 0


@torch.inference_mode()
def mask_logits(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, ahead: int) -> torch.Tensor:
    """Logits [n, ahead, V] of the mask rows behind each of n tokens [n].

    Args:
        mask: [h], the embedding of all mask rows.
    """
    count = len(tokens)
    rows = torch.arange(count * ahead)
    anchors, places = rows // ahead, rows % ahead
    positions = torch.cat((torch.arange(count), anchors + places + 1))
    sees = torch.zeros(len(positions), len(positions), dtype=torch.bool)
    sees[:count, :count] = torch.ones(count, count, dtype=torch.bool).tril()
    sees[count:, :count] = torch.arange(count) <= anchors[:, None]
    sees[count:, count:] = (anchors == anchors[:, None]) & (places <= places[:, None])
    given = torch.cat((model.get_input_embeddings()(tokens), mask.expand(len(rows), -1)))
    bias = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    made = model(inputs_embeds=given[None], attention_mask=bias[None, None], position_ids=positions[None], use_cache=False)
    logits: torch.Tensor = made.logits[0, count:]
    return logits.view(count, ahead, -1)


def embeddings_of(model: PreTrainedModel, prompt: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The mask embeddings that are tried, by name."""
    table = model.get_input_embeddings().weight
    return {"mean of the prompt's": table[prompt].mean(0), "mean of all": table.mean(0)}


def guesses_of(model: PreTrainedModel, texts: Sequence[Trace], ahead: int) -> dict[str, list[Guesses]]:
    """What the rows guess on answers, by mask embedding and place: index 0 is the token after the next one."""
    found: dict[str, list[Guesses]] = {}
    for text in texts:
        tokens, first = torch.tensor([*text.prompt, *text.output]), len(text.prompt) - 1
        for name, mask in embeddings_of(model, torch.tensor(text.prompt)).items():
            counted = found.setdefault(name, [Guesses() for _ in range(ahead)])
            likely = mask_logits(model, tokens, mask, ahead).topk(_AMONG).indices
            for place, one in enumerate(counted):
                anchors = torch.arange(first, len(tokens) - place - 2)
                held = likely[anchors, place] == tokens[anchors + place + 2][:, None]
                one.judged += len(anchors)
                one.right += int(held[:, 0].sum())
                one.among += int(held.any(-1).sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUILT_IN, help="the target; default: the built-in one")
    parser.add_argument("--traces", type=Path, required=True, help="folder of outrider bench, or its file of traces")
    parser.add_argument("--ahead", type=int, default=3, help="rows behind each token; default: 3")
    arguments = parser.parse_args()
    if not 1 <= arguments.ahead <= 8:
        parser.error("--ahead must be from 1 to 8")
    folder = as_float32(resolve(arguments.model, cache_folder(), say=print).path, say=print)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    print(f"| mask embedding | tokens ahead | judged | right | among {_AMONG} |\n|---|---|---|---|---|")
    for name, places in guesses_of(model, read_traces(arguments.traces), arguments.ahead).items():
        for place, one in enumerate(places):
            share = f"{one.right / max(1, one.judged):.1%} | {one.among / max(1, one.judged):.1%}"
            print(f"| {name} | {place + 2} | {one.judged:,} | {share} |")


if __name__ == "__main__":
    main()
