"""Help of commands: examples at its end, and paragraphs as wide as the terminal."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import typer

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "serve": (
        "outrider serve --in-process",
        "outrider serve --model ./my-model --set verifier.max_num_seqs=8 --set server.http_port=8080",
        "outrider serve --config outrider.yaml",
    ),
    "draft": ("outrider draft --config drafter.yaml --set drafter.port=50061",),
    "verify": ("outrider verify --config verifier.yaml --set verifier.port=50071",),
    "plan": (
        "outrider plan --model ./my-model",
        "outrider plan --model ./my-model --gpus 2xH100",
        "outrider plan --set router.rules_file=rules.yaml --explain request.json",
    ),
    "doctor": ("outrider doctor", "outrider doctor --config outrider.yaml --json"),
    "generate": (
        "outrider generate 'Once upon a time' --in-process --max-tokens 32 --sources",
        "outrider generate 'def add(a, b):' --strategy suffix --temperature 0.7 --seed 3",
    ),
    "chat": (
        "outrider chat",
        "outrider chat 'Why is the sky blue?' --strategy blend --sources",
        "outrider chat 'Count to five.' --address 10.0.0.7:50051 --tls --api-key KEY",
    ),
    "models": ("outrider models -v",),
    "forget": ("outrider forget --api-key KEY",),
    "run-batch": (
        "outrider run-batch -i requests.jsonl -o answers.jsonl --in-process --model ./my-model",
        "outrider run-batch -i requests.jsonl -o answers.jsonl --url https://outrider.example:8000 --at-once 64 --resume",
    ),
    "top": ("outrider top", "outrider top --once --json", "outrider top --url http://127.0.0.1:9464/metrics"),
    "new-key": ("outrider new-key --tenant acme >> keys.yaml",),
    "reload": ("outrider reload /checkpoints/step-100 --api-key KEY",),
    "replay": (
        "outrider replay ./my-run --strategies suffix,recycling,blend --budgets 8,32",
        "outrider replay ./my-run --set retrieval.index=./my-index --strategies rest,blend",
    ),
}


def epilog(command: str) -> str | None:
    """What ``--help`` of a command ends with."""
    shown = EXAMPLES.get(command, ())
    return "\n\n".join((f"Example{'s' * (len(shown) > 1)}:", *shown)) if shown else None


def join_lines(app: typer.Typer) -> None:
    """Join the lines of each paragraph of a command's help, and of the commands below it.

    Typer keeps the line ends that a docstring has in the code, where a narrower terminal breaks lines again.
    """
    for command in app.registered_commands:
        if command.help is None:
            command.help = _joined(command.callback)
    if (own := app.registered_callback) is not None and not isinstance(own.help, str):
        own.help = _joined(own.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            join_lines(group.typer_instance)


def _joined(function: object) -> str | None:
    said = inspect.getdoc(function)
    return None if said is None else "\n\n".join(" ".join(part.split("\n")) for part in said.split("\n\n"))
