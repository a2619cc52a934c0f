"""The sequences of training data, in the order in which they are made.

A sequence is a prompt with a sampling, called a task; its id is the same in every run, and its seed follows from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.prompt_files import EncodedPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTask:
    """One sequence to be made: the ``visit``-th answer to a prompt, or the one that is given."""

    prompt: EncodedPrompt
    visit: int

    @property
    def id(self) -> str:
        """The same in every run."""
        return f"{self.prompt.digest}-{'given' if self.prompt.answer else self.visit}"

    @property
    def temperature(self) -> float:
        """0 or 1: one of a prompt's first two answers is greedy, which one is drawn by its hash; all others are sampled.

        A given answer is nobody's likeliest: it counts as sampled.
        """
        if self.prompt.answer:
            return 1.0
        return 0.0 if self.visit == int(self.prompt.digest[-1], 16) % 2 else 1.0

    def seed(self, run_seed: int) -> int:
        """Of the noise that chooses its tokens, 64 bits."""
        return seed_of(run_seed, self.id)


def seed_of(run_seed: int, name: str) -> int:
    """A seed of 64 bits for what is called ``name`` in a run."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{name}".encode()).digest()[:8], "little")


def tasks_of(prompts: Sequence[EncodedPrompt], samples: int, seed: int) -> list[DataTask]:
    """All tasks in the order in which they are made.

    The domains take turns as long as they have tasks, so any beginning of the list is a balanced mix. A domain begins
    again from its first prompt when all have been used, up to ``samples`` times; given answers are read once.
    """
    by_domain: dict[str, list[EncodedPrompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    queues: list[Iterator[DataTask]] = []
    for members in by_domain.values():
        members.sort(key=lambda prompt: hashlib.sha256(f"{seed}/{prompt.digest}".encode()).digest())
        queues.append(
            iter(
                [
                    DataTask(prompt=prompt, visit=visit)
                    for visit in range(samples)
                    for prompt in members
                    if not (visit and prompt.answer)
                ]
            )
        )
    ordered: list[DataTask] = []
    while queues:
        for queue in list(queues):
            task = next(queue, None)
            if task is None:
                queues.remove(queue)
            else:
                ordered.append(task)
    return ordered
