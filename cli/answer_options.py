"""What the commands that ask for an answer may say of it."""

from __future__ import annotations

from typing import Annotated

import typer

from speculation.sources import STRATEGIES

Strategy = Annotated[str | None, typer.Option(help=f"One of {', '.join(STRATEGIES)}. Default: the server's.")]
DraftSources = Annotated[
    str | None,
    typer.Option(
        "--draft-sources",
        help="In place of a strategy: comma-separated sources that draft one tree, as lookahead,rest.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate. Default: the model's, or 256.")]
Temperature = Annotated[
    float | None, typer.Option(help="0: always the likeliest token; larger is more random. Default: the model's, or 0.")
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same answer. Default: a random one, printed with --json.")
]
TopP = Annotated[float | None, typer.Option(help="Keep only the likeliest tokens whose probabilities add up to this.")]
TopK = Annotated[int | None, typer.Option(help="Keep only this many of the likeliest tokens.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text. Repeatable.")]
Nodes = Annotated[int | None, typer.Option(help="Most drafted tokens to check in one pass.")]
EffortName = Annotated[
    str | None,
    typer.Option(
        "--effort",
        help="paper: each step waits for a draft and checks all of it; measured: as far as that pays. Default: measured for "
        "auto and blend, paper for other strategies.",
    ),
]
DrafterName = Annotated[
    str | None, typer.Option("--drafter", help="Name of the model that drafts, of those that the server has for you.")
]
Sources = Annotated[
    bool,
    typer.Option("--sources", help="Show who guessed which part of the answer: by colour on a terminal, and in numbers."),
]
