"""Records answers of the target, with the tokens that it found likeliest at each of their positions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from benchmarks.bench.prompts import read_prompts
from cluster.build import in_process
from cluster.models.target import resolve
from cluster.settings.config import load
from lab.regret.recorded_answers import TOP, RecordedAnswer
from services.api.messages import ChatMessage
from services.router.tokens import Tokens
from services.verifier.engine.loop import DecodingLoop
from speculation.messages import GenerationRequest, Progress
from speculation.types import Plan, SamplingParams


async def record(
    prompts: Sequence[str], per_task: int, longest: int, tokens: int, temperatures: Sequence[float], flags: Sequence[str]
) -> AsyncIterator[RecordedAnswer]:
    """Let the target answer prompts in this process, by plain decoding.

    Args:
        prompts: files, see ``benchmarks.bench.prompts``. Of each task, the first ``per_task`` of at most ``longest`` tokens.
        temperatures: each prompt is answered once at each.
        flags: settings of the server, of the form section.key=value.

    Raises:
        ConfigurationError: a file of prompts or a setting is wrong.
    """
    asked = [prompt for file in prompts for prompt in read_prompts(file)]
    settings = load(flags=flags)
    model = resolve(settings.model, settings.cache_dir)
    words = Tokens(str(model.path))
    chosen: dict[str, list[tuple[int, ...]]] = {}
    for prompt in asked:
        own = chosen.setdefault(prompt.task, [])
        if len(own) < per_task:
            ids = tuple(words.encode_chat([ChatMessage(role="user", content=prompt.turns[0])]))
            own += [ids] if len(ids) <= longest else []
    async with in_process(settings, model) as running:
        for number in range(per_task):
            # At once, since a pass over several rows takes little longer than one.
            requests = [
                (_request(f"{task}-{number}-{temperature}", several[number], temperature, number, tokens), task)
                for task, several in chosen.items()
                for temperature in temperatures
                if number < len(several)
            ]
            loop = running.verifier.loop
            for answer in await asyncio.gather(*(_answer(loop, request, task) for request, task in requests)):
                yield answer


def _request(name: str, prompt: tuple[int, ...], temperature: float, seed: int, tokens: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, logprobs=TOP)
    return GenerationRequest(request_id=name, prompt=prompt, sampling=sampling, plan=Plan(strategy="autoregressive"))


async def _answer(loop: DecodingLoop, request: GenerationRequest, task: str) -> RecordedAnswer:
    said: list[int] = []
    top: list[tuple[int, ...]] = []
    async for event in loop.generate(request):
        if isinstance(event, Progress):
            said += event.token_ids
            top += [each.top_ids for each in event.logprobs]
    return RecordedAnswer(
        task=task,
        temperature=request.sampling.temperature,
        prompt_ids=request.prompt,
        output_ids=tuple(said),
        top_ids=tuple(top),
    )
