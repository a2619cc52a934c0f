"""The command line: ``outrider serve``, ``generate``, ``chat``, ``plan``, ``top``, ``doctor`` and what else --help lists."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import (
    batch_command,
    bench_commands,
    canary_command,
    disco_command,
    forget_command,
    index_commands,
    operator_commands,
    outside_commands,
    paper_command,
    plan_command,
    tau_command,
    train_commands,
    train_run_commands,
)
from cli.bench_options import read_names
from cli.examples import epilog, join_lines
from cli.options import (
    Address,
    ApiKey,
    ConfigFile,
    DrafterName,
    DraftSources,
    EffortName,
    MaxTokens,
    MinP,
    Nodes,
    Seed,
    Set,
    Sources,
    Stop,
    Strategy,
    Temperature,
    Tls,
    TlsRoot,
    TopK,
    TopP,
    credentials,
    default_address,
    settings_of,
)
from cli.other_servers import SettingsCommand
from cli.printed_answer import print_answer
from cluster.process.starting import begin_starting
from cluster.process.terminal import end_with, prepare_streams
from services.logs.clean import clean_logs
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    import outrider
    from cluster.settings.config import Settings
    from outrider.requests import Message, Options

# Slow imports are left to the command that needs them, so that `outrider --help` answers at once.

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Try: outrider generate 'Once upon a time' --in-process",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"outrider {version('outrider-server')}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Outrider serves a language model faster without changing one token: drafters propose, the target chooses."""


# Panels of `outrider --help`, in this order.
_SERVE, _ASK, _OPERATE, _MEASURE, _BUILD = "Serve", "Ask", "Operate", "Measure", "Build"

ModelName = Annotated[
    str | None, typer.Option("--model", help="Hugging Face name, folder or .gguf file. Default: SmolLM2-135M-Instruct.")
]
InProcess = Annotated[bool, typer.Option("--in-process", help="Load the model into this process instead of using a server.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the components' logs.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")]


@app.command(rich_help_panel=_SERVE, cls=SettingsCommand, epilog=epilog("serve"))
def serve(
    config: ConfigFile = None,
    model: ModelName = None,
    host: Annotated[str | None, typer.Option(help="Interface of the public server. Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of gRPC. Default: 50051. That of HTTP: --set server.http_port=8000.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the application on Ray. Default: outrider.")] = None,
    in_process: Annotated[bool, typer.Option("--in-process", help="One process, no Ray.")] = False,
    settings: Set = None,
    verbose: Verbose = False,
) -> None:
    """Serve a model over gRPC and HTTP until interrupted: router, drafter and verifier on Ray Serve, or in one process."""
    from cli.start_remarks import say_what_is_idle, say_what_lacks
    from cluster.entry.public import how_to_try
    from cluster.process.signals import STOPPED_AT_ONCE, stop_on_signals
    from cluster.service import serving, wait_for_interrupt
    from cluster.settings.component_configs import http_config

    stop_on_signals(STOPPED_AT_ONCE)
    named = {"model": model, "server.host": host, "server.port": port, "cluster.name": name}
    loaded = settings_of(config, settings, **named)
    say_what_is_idle(loaded, in_process)
    with serving(loaded, in_process=in_process, verbose=verbose) as addresses:
        ready = f"Outrider serves {loaded.model} at {addresses.grpc} (Ctrl-C stops it)"
        say_what_lacks(loaded, in_process)
        if addresses.http is not None and (http := http_config(loaded)) is not None:
            ready += f"\n{how_to_try(addresses.http, needs_key=http.public.asks_for_keys, page=http.page)}"
        wait_for_interrupt(ready)


@app.command(rich_help_panel=_ASK, epilog=epilog("generate"))
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue, without a chat template (see outrider chat).")],
    strategy: Strategy = None,
    draft_sources: DraftSources = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    stop: Stop = None,
    num_speculative_tokens: Nodes = None,
    effort: EffortName = None,
    drafter: DrafterName = None,
    sources: Sources = False,
    as_json: Json = False,
    address: Address = None,
    in_process: InProcess = False,
    model: ModelName = None,
    config: ConfigFile = None,
    settings: Set = None,
    api_key: ApiKey = None,
    tls: Tls = False,
    tls_root: TlsRoot = None,
    verbose: Verbose = False,
) -> None:
    """Continue a text. Needs a running server, or --in-process."""
    options = _options(
        strategy=strategy, max_tokens=max_tokens, temperature=temperature, seed=seed, top_p=top_p, top_k=top_k,
        min_p=min_p, stop=stop, num_speculative_tokens=num_speculative_tokens, effort=effort,
        sources=None if draft_sources is None else read_names(draft_sources), drafter=drafter,
        report="sources" if sources else None,
    )  # fmt: skip
    with _client(
        address, in_process, model, config, settings, verbose, prompt, options, credentials(api_key, tls, tls_root)
    ) as client:
        print_answer(client.stream(prompt, **options), as_json, sources=sources)


@app.command(rich_help_panel=_ASK, epilog=epilog("chat"))
def chat(
    message: Annotated[
        str | None, typer.Argument(help="The user's message, for the model's chat template. Without it: a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    strategy: Strategy = None,
    draft_sources: DraftSources = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    stop: Stop = None,
    num_speculative_tokens: Nodes = None,
    effort: EffortName = None,
    drafter: DrafterName = None,
    sources: Sources = False,
    as_json: Json = False,
    address: Address = None,
    in_process: InProcess = False,
    model: ModelName = None,
    config: ConfigFile = None,
    settings: Set = None,
    api_key: ApiKey = None,
    tls: Tls = False,
    tls_root: TlsRoot = None,
    verbose: Verbose = False,
) -> None:
    """Answer a message, or hold a conversation. Needs a running server, or --in-process."""
    from cli.conversation import Conversation

    if message is None and as_json:
        raise ConfigurationError("a conversation is no JSON object; give it a message", field="--json")
    options = _options(
        strategy=strategy, max_tokens=max_tokens, temperature=temperature, seed=seed, top_p=top_p, top_k=top_k,
        min_p=min_p, stop=stop, num_speculative_tokens=num_speculative_tokens, effort=effort,
        sources=None if draft_sources is None else read_names(draft_sources), drafter=drafter,
        report="sources" if sources else None,
    )  # fmt: skip
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    asked: list[Message] = [*messages, {"role": "user", "content": message or "Hello!"}]
    with _client(
        address, in_process, model, config, settings, verbose, asked, options, credentials(api_key, tls, tls_root)
    ) as client:
        if message is None:
            Conversation(client, messages, options, sources=sources).run()
        else:
            print_answer(client.stream(messages=asked, **options), as_json, sources=sources)


@app.command(rich_help_panel=_ASK, epilog=epilog("models"))
def models(
    address: Address = None,
    config: ConfigFile = None,
    settings: Set = None,
    api_key: ApiKey = None,
    tls: Tls = False,
    tls_root: TlsRoot = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show what each model's generation_config.json does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models that a server serves, and those on this machine."""
    import outrider
    from cli.models_report import print_models

    loaded = settings_of(config, settings)
    where = address or default_address(loaded)
    retry = outrider.Retry(attempts=1)
    with outrider.Client(where, timeout_s=5, retry=retry, **credentials(api_key, tls, tls_root)) as client:
        try:
            served = client.models()
        except outrider.Unavailable:
            if address is not None:
                raise
            served = []
    print_models(where, served, loaded, verbose=verbose, as_json=as_json)


for _panel, _commands in (
    (_SERVE, (outside_commands.draft, outside_commands.verify, plan_command.plan, operator_commands.doctor)),
    (_ASK, (forget_command.forget, batch_command.run_batch)),
    (_OPERATE, operator_commands.COMMANDS),
    (_MEASURE, (bench_commands.replay,)),
):
    for _command in _commands:
        _kind, _epilog = SettingsCommand if _panel == _SERVE else None, epilog(_command.__name__.replace("_", "-"))
        app.command(rich_help_panel=_panel, cls=_kind, epilog=_epilog)(_command)
app.add_typer(bench_commands.app, name="bench", rich_help_panel=_MEASURE)
app.add_typer(paper_command.app, name="paper", rich_help_panel=_MEASURE)
app.add_typer(index_commands.app, name="index", rich_help_panel=_BUILD)
for command in (*train_run_commands.COMMANDS, tau_command.tau, disco_command.disco, canary_command.canary):
    train_commands.app.command()(command)
app.add_typer(train_commands.app, name="train", rich_help_panel=_BUILD)
join_lines(app)


@contextmanager
def _client(
    address: str | None,
    in_process: bool,
    model: str | None,
    config: Path | None,
    settings: list[str] | None,
    verbose: bool,
    source: str | Sequence[Message],
    options: Options,
    credentials: dict[str, Any],
) -> Iterator[outrider.Client]:
    """A client of a running server, or of one in this process for the duration of the block."""
    import outrider

    if in_process and address:
        raise ConfigurationError("--address and --in-process exclude each other", about="--address")
    if in_process:
        from cluster.settings.server import ServerSettings

        loaded = settings_of(config, settings, model=model)
        # Only this process may reach the server, so the settings of the public server are ignored.
        unseen = ServerSettings.model_validate({"port": 0, "http_port": None, "ops_port": None})
        private = loaded.model_copy(update={"server": unseen})
        _check_request(private, source, options)
        if options.get("strategy"):
            # So that its model is there before the request.
            router = private.router.model_copy(update={"strategy": options["strategy"]})
            private = private.model_copy(update={"router": router})
        service: Any = _private(private, verbose=verbose)
        credentials = {}
    else:
        loaded = settings_of(config, settings)
        service = nullcontext(address or default_address(loaded))
        if model is not None:
            options["model"] = model
    with service as where, outrider.Client(where, **credentials) as client:
        yield client


@contextmanager
def _private(settings: Settings, *, verbose: bool) -> Iterator[str]:
    from cluster.service import serving

    with serving(settings, in_process=True, verbose=verbose) as addresses:
        yield addresses.grpc


def _check_request(settings: Settings, source: str | Sequence[Message], options: Options) -> None:
    """Refuse what the server in this process would refuse, before the model is loaded.

    Raises:
        InvalidArgument: names the field, its value and what is allowed.
    """
    from cluster.models.target import ResolvedModel
    from cluster.settings import component_configs
    from outrider.requests import build_request
    from services.api.grpc.messages import decode_request
    from services.router.comparisons import plan_comparisons
    from services.router.plans import make_plan

    prompt, messages = (source, None) if isinstance(source, str) else (None, source)
    wire = build_request(prompt, messages, None, options)
    strategy = component_configs.router_config(
        settings, ResolvedModel(name=settings.model, path=Path(settings.model))
    ).strategy
    request = decode_request(wire, tenant=None)
    make_plan(request, strategy.for_tenant(request.tenant))
    plan_comparisons(request, strategy)


def _options(**given: Any) -> Options:
    options: Options = {}
    options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    return options


def main() -> None:
    """Run the command line. A mistake of the user prints one line on stderr and exits with 2, a failure with 1."""
    begin_starting()
    prepare_streams()
    clean_logs()
    try:
        app()
    except KeyboardInterrupt:
        _leave(130)
    except BrokenPipeError:
        # The reader of our output has closed the pipe.
        _leave(1)
    except Exception as error:
        end_with(error)


def _leave(code: int) -> None:
    """Exit at once, without waiting for threads that still load a model."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
