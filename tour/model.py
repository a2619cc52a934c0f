"""The default model as every chapter uses it: loaded once, with its tokeniser, and asked in one thread."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rich.console import Console
from typing_extensions import override

from cluster.models.target import resolve
from cluster.settings import component_configs
from cluster.settings.config import load
from services.api.messages import ChatMessage
from services.router.tokens import Tokens
from services.verifier.attention.calls import MAX_NODES
from services.verifier.checks.pass_costs import costs_of
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Outcome, Prefix, Rows, Sampling
from speculation.costs import CostTable
from speculation.types import EMPTY_TREE, SamplingParams, TokenTree

console = Console(highlight=False)


class OneThread(ThreadPoolExecutor):
    """The only thread that computes: two would have two teams of OpenMP threads, which slow each other down.

    A decoding loop shuts its executor down when it stops; this one stays for the next chapter.
    """

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Goes on."""


class Model:
    """The target that ``outrider serve`` runs, and its tokeniser."""

    def __init__(self) -> None:
        settings = load()
        found = resolve(settings.model, settings.cache_dir, say=console.print)
        self.config = component_configs.verifier_config(settings, found)
        self.tokens = Tokens(str(found.path))
        self.worker = OneThread(max_workers=1)
        self.target = self.worker.submit(TransformersTarget, self.config.target).result()

    def prompt(self, message: str) -> tuple[int, ...]:
        """The token ids of a chat with one message, up to where the answer begins."""
        return self.tokens.encode_chat([ChatMessage(role="user", content=message)])

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return self.tokens.decode(tokens)

    def costs(self) -> CostTable:
        """What passes cost on this machine: measured at the first call, which takes ten seconds, and kept in a file."""
        return self.worker.submit(costs_of, self.target, self.config.target, self.config.costs_dir).result()

    @contextmanager
    def request(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[OpenRequest]:
        """Room in the KV cache for a prompt, its answer and a tree, during the block."""
        rows = len(prompt) + sampling.max_tokens + MAX_NODES
        self.target.open("tour", rows, Prefix(tokens=prompt), sampling=Sampling(params=sampling, prompt_length=len(prompt)))
        try:
            yield OpenRequest(self)
        finally:
            self.target.close("tour")


class OpenRequest:
    """One request at the target: ``run`` is a forward pass, ``keep`` says which of its rows belong to the text."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.context = 0  # Tokens whose keys and values the cache holds.

    def run(self, chain: Sequence[int], tree: TokenTree = EMPTY_TREE, top_k: int = 0) -> Outcome:
        """One forward pass over tokens that follow the text, and a tree of guesses below the last of them.

        Returns the target's choice after the chain, and after every node of the tree.
        """
        tokens, wanted = (*chain, *tree.tokens), 1 + len(tree)
        rows = Rows(request_id="tour", context=self.context, tokens=tokens, parents=tree.parents, logits=wanted, top_k=top_k)
        return self._model.worker.submit(self._pass, rows).result()

    def _pass(self, rows: Rows) -> Outcome:
        self._model.target.begin([rows])
        return self._model.target.finish()[0]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the keys and values of these rows of the last pass, and forget the others."""
        self._model.worker.submit(self._model.target.keep, "tour", self.context, rows).result()
        self.context += len(rows)


def say(text: str) -> None:
    """Print paragraphs, wrapped to the terminal's width."""
    for paragraph in text.split("\n\n"):
        console.print(" ".join(paragraph.split()) + "\n")


@functools.cache
def open_model() -> Model:
    """The model, loaded at the first call."""
    console.print("[dim]Loading the default model[/dim]")
    return Model()
