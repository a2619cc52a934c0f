"""``outrider run-batch``: a file of requests, answered into another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import ApiKey, ConfigFile, Set, TlsRoot, settings_of
from cluster.process.terminal import stderr
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from cli.batch_run import BatchTally
    from cluster.settings.config import Settings

_UNSEEN = {
    "host": "127.0.0.1", "port": 0, "http_port": 0, "ops_port": None, "tls_certificate": None, "tls_key": None,
    "keys_file": None, "api_key_hashes": (), "http_hosts": (),
}  # fmt: skip


def run_batch(
    requests: Annotated[
        Path,
        typer.Option(
            "--input-file", "-i", help="JSON lines of custom_id, method POST, url as /v1/chat/completions, and body."
        ),
    ],
    answers: Annotated[
        Path,
        typer.Option("--output-file", "-o", help="New file: a line for each request, in the order in which they end."),
    ],
    url: Annotated[
        str | None, typer.Option(help="A running server's HTTP. Default: that of the settings, http://127.0.0.1:8000.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Most requests at once. Default: verifier.max_num_seqs."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the answers that the file has, and ask for the others.")
    ] = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Load the model into this process instead of using a server.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="With --in-process: Hugging Face name, folder or .gguf file.")
    ] = None,
    config: ConfigFile = None,
    settings: Set = None,
    api_key: ApiKey = None,
    tls_root: TlsRoot = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the components' logs.")] = False,
) -> None:
    """Answer a file of requests, as OpenAI's batches and `vllm run-batch` have it. Needs a running server, or --in-process.

    A request that is refused is a line, too, with the status and the error. While the server is busy or away, requests are
    tried again, for ten minutes each. Exit code 1: not all were answered.
    """
    from cli.batch_files import AnswersFile, read_requests
    from cli.batch_run import BatchRun
    from cluster.process.signals import stop_on_signals

    if in_process and url:
        raise ConfigurationError("--url and --in-process exclude each other", about="--url")
    if model is not None and not in_process:
        raise ConfigurationError("a server has its model; --model goes with --in-process", about="--model")
    if tls_root is not None and not tls_root.is_file():
        raise ConfigurationError("no such file", field="--tls-root", value=tls_root)
    asked = read_requests(requests)
    loaded = settings_of(config, settings, model=model)
    roots = tls_root.read_text(errors="replace") if tls_root is not None else None
    stop_on_signals()
    answered = AnswersFile(answers, resume=resume)
    try:
        with _served(loaded, url, in_process=in_process, verbose=verbose) as where:
            run = BatchRun(where, api_key=api_key, roots=roots, at_once=at_once or loaded.verifier.max_num_seqs)
            left = [request for request in asked if request.custom_id not in answered.answered]
            for line in _shown(run.lines(left), left):
                answered.add(line)
    except BaseException:
        if not answered.empty:
            said = f"{answers} has what was answered; --resume goes on"
            stderr().print(said, highlight=False, markup=False, soft_wrap=True)
        raise
    finally:
        answered.close()
    _tell(run.tally, len(asked) - len(left), answers)
    if run.tally.refused:
        raise typer.Exit(1)


@contextmanager
def _served(settings: Settings, url: str | None, *, in_process: bool, verbose: bool) -> Iterator[str]:
    """Where the service is that answers during the block."""
    server = settings.server
    if not in_process:
        if url is None and not server.http:
            raise ConfigurationError("name the server's HTTP with --url", field="server.http_port", value=server.http_port)
        yield url or f"{'http' if server.tls_certificate is None else 'https'}://{server.host}:{server.http}"
        return
    from cluster.service import serving

    # Only this process may reach the server; what the public one says of answers holds here, too.
    private = settings.model_copy(update={"server": server.model_copy(update=_UNSEEN)})
    with serving(private, in_process=True, verbose=verbose) as addresses:
        assert addresses.http is not None
        yield addresses.http


def _shown(lines: Iterable[dict[str, Any]], asked: Sequence[object]) -> Iterator[dict[str, Any]]:
    """The lines, and on a terminal how many there are."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=stderr(), transient=True) as bars:
        task = bars.add_task("", total=len(asked))
        for line in lines:
            yield line
            bars.advance(task)


def _tell(tally: BatchTally, kept: int, answers: Path) -> None:
    told = [f"{tally.answered} answered", f"{tally.refused} refused", *([f"{kept} kept"] if kept else [])]
    say = stderr().print
    say(f"{', '.join(told)}: {answers}", highlight=False, markup=False, soft_wrap=True)
    for name, count in sorted(tally.left_out.items()):
        say(f"{name}: left out of {count} (server.unknown_fields)", highlight=False, markup=False, soft_wrap=True)
