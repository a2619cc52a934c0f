"""``outrider index``: build an index from a corpus, inspect it, and manage its versions in Redis."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.index_building import build_progress, built_index, open_tokenizer
from cli.options import settings_of
from cluster.process.terminal import stderr, stdout
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from cluster.models.target import ResolvedModel
    from retrieval_index.manifest import Manifest
    from retrieval_index.store import IndexStore

app = typer.Typer(
    no_args_is_help=True,
    help="Build retrieval indexes, inspect them, and publish them through Redis.",
    epilog="Try: outrider index build --corpus src/ --out my-index, then: outrider serve --set retrieval.index=my-index",
)

_PASSWORD = "OUTRIDER_RETRIEVAL__REDIS_PASSWORD"
Folder = Annotated[Path, typer.Argument(help="Folder of an index.")]
Url = Annotated[
    str,
    typer.Option(
        "--redis",
        envvar="OUTRIDER_RETRIEVAL__REDIS_URL",
        help="redis://USER:PASSWORD@HOST:PORT, or rediss:// for TLS (?ssl_ca_certs=FILE). The variable hides it from ps; "
        f"{_PASSWORD} may hold the password instead, as it is.",
    ),
]
Name = Annotated[str, typer.Option("--name", help="Name of the index in Redis: retrieval.name of the service.")]


@app.command()
def build(
    corpus: Annotated[list[Path], typer.Option(help="A .jsonl file, a text file or a folder of them. Repeatable.")],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the index; continues an interrupted build.")],
    model: Annotated[str | None, typer.Option(help="The target model. Default: the built-in one.")] = None,
    keep: Annotated[float, typer.Option(help="Share to keep: documents with the lowest perplexity.")] = 0.3,
    keep_by: Annotated[
        Literal["documents", "tokens", "length"],
        typer.Option(
            help="What --keep is a share of: the documents; the tokens of all (as much text is kept, in longer or shorter "
            "documents); or length: of the documents of each class of length, so that none is favoured for its length."
        ),
    ] = "documents",
    field: Annotated[str | None, typer.Option(help="Field of a jsonl line that holds the text.")] = None,
    score_tokens: Annotated[
        str,
        typer.Option(
            help="Tokens of each document, from its beginning, that are scored, or all; also the window of --semantic."
        ),
    ] = "256",
    depth: Annotated[int, typer.Option(help="Longest n-gram, in tokens; at most half of it is matched.")] = 16,
    semantic: Annotated[
        bool, typer.Option("--semantic", help="Also index the kept documents' hidden states, for retrieval.semantic.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device of the target: cpu or cuda.")] = "cpu",
) -> None:
    """Read a corpus, keep the documents that the target finds likely, and index them.

    Documents that occur twice are read once. The result is a folder with an n-gram trie, a snapshot of likely successors
    (with which the source `recycling` starts), a histogram of perplexities, and a manifest with checksums. With --semantic
    it also holds a FAISS index of the hidden states: the target reads every kept token, and each number of its state takes
    up to two bytes.
    """
    from cluster.checks.host import check_folder

    # Importing, reading and scoring take long, so the folder is checked first.
    check_folder("--out", out_folder)
    from retrieval_index.builder import BuildConfig
    from retrieval_index.corpus import read_corpus

    config = BuildConfig(keep=keep, keep_by=keep_by, depth=depth, score_tokens=_scored(score_tokens), semantic=semantic)
    manifest = built_index(read_corpus(corpus, field), _resolve(model), out_folder, config, device)
    _show(manifest, out_folder)


@app.command()
def inspect(
    folder: Folder,
    text: Annotated[str | None, typer.Option(help="Look up what follows this text.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model whose tokenizer is used. Default: the one that built the index.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Show the manifest of an index and, with --text, what it finds."""
    from retrieval_index.manifest import read_manifest

    manifest = read_manifest(folder)
    if as_json:
        typer.echo(manifest.to_json())
        return
    _show(manifest, folder)
    if text is not None:
        _look_up(folder, text, model or manifest.model)


@app.command()
def verify(folder: Folder) -> None:
    """Compare every file of an index with its checksum."""
    from retrieval_index.manifest import read_manifest
    from retrieval_index.manifest import verify as verify_parts

    manifest = read_manifest(folder)
    verify_parts(folder, manifest)
    stdout().print(f"{folder} is whole: {len(manifest.parts)} parts, version {manifest.version}")


@app.command()
def publish(
    folder: Folder,
    redis: Url,
    name: Name = "default",
    promote: Annotated[bool, typer.Option(help="Make it live at once.")] = True,
) -> None:
    """Upload an index and make it live. Waits for other publishers; services switch without interrupting look-ups."""
    with build_progress() as advance, _store(redis, name) as store:
        version = store.publish(folder, promote=promote, advance=advance)
    stdout().print(f"version {version} is {'live' if promote else 'there; make it live with: outrider index promote'}")


@app.command("list")
def list_versions(
    redis: Url,
    name: Name = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the versions in Redis."""
    from rich.markup import escape
    from rich.table import Table

    with _store(redis, name) as store:
        versions = store.versions()
    if as_json:
        typer.echo(json.dumps([{"version": each.version, "live": each.live} for each in versions]))
        return
    table = Table("version", "live", "model", "documents", "tokens")
    for each in versions:
        kept = f"{each.manifest.kept:,} of {each.manifest.documents:,}"
        table.add_row(
            each.version, "yes" if each.live else "", escape(each.manifest.model), kept, f"{each.manifest.tokens:,}"
        )
    stdout().print(table if versions else f"no version of {name} has been published")


@app.command()
def promote(
    version: Annotated[str, typer.Argument(help="One that outrider index list shows.")],
    redis: Url,
    name: Name = "default",
) -> None:
    """Make a version in Redis live."""
    with _store(redis, name) as store:
        store.promote(version)
    stdout().print(f"version {version} is live")


@app.command()
def rollback(redis: Url, name: Name = "default") -> None:
    """Make the previously live version live again."""
    with _store(redis, name) as store:
        version = store.rollback()
    stdout().print(f"version {version} is live again")


@app.command()
def delete(
    version: Annotated[str, typer.Argument(help="One that outrider index list shows; not the live one.")],
    redis: Url,
    name: Name = "default",
) -> None:
    """Delete a version that is not live. Only the two latest of the versions that were live are kept anyway."""
    with _store(redis, name) as store:
        store.delete(version)
    stdout().print(f"version {version} is deleted")


@app.command("redis")
def run_redis(
    data: Annotated[Path | None, typer.Option(help="Folder for its data. Default: the data is lost when it ends.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: any free one.")] = None,
) -> None:
    """Run the embedded Redis on loopback until interrupted, and print its URL. Several machines need a real Redis."""
    from cluster.service import wait_for_interrupt
    from retrieval_index.embedded import embedded_redis

    with embedded_redis(data, port) as url:
        wait_for_interrupt(url)


def _scored(text: str) -> int | None:
    """How many tokens of a document are scored; None: all."""
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ConfigurationError(
            field="--score-tokens", verb="", value=text, allowed="a whole number from 8 to 8192, or all"
        ) from error


def _store(url: str, name: str) -> IndexStore:
    """The versions of an index in Redis."""
    from retrieval_index.store import IndexStore

    return IndexStore(url, name, os.environ.get(_PASSWORD))


def _show(manifest: Manifest, folder: Path) -> None:
    from rich.markup import escape
    from rich.table import Table

    size = sum(part.size for part in manifest.parts.values())
    table = Table(show_header=False, title=escape(str(folder)), title_justify="left")
    for label, value in (
        ("version", manifest.version),
        ("for the tokens of", f"{escape(manifest.model)} ({manifest.tokenizer_sha256[:12]})"),
        ("documents", f"{manifest.kept:,} of {manifest.documents:,} kept ({manifest.filter})"),
        ("tokens", f"{manifest.tokens:,}"),
        ("longest n-gram", str(manifest.depth)),
        ("hidden states", "yes" if manifest.semantic else "no"),
        ("size", f"{size / 2**20:,.1f} MiB in {len(manifest.parts)} parts"),
    ):
        table.add_row(label, value)
    stdout().print(table)


def _look_up(folder: Path, text: str, model: str) -> None:
    from retrieval_index.index import open_index
    from speculation.messages import RetrievalQuery

    path = _resolve(model).path
    digest, tokenizer = open_tokenizer(path)
    index = open_index(folder, digest)
    ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    (found,) = index.look_up([RetrievalQuery(suffix=ids[-64:], max_continuations=16, max_length=10)])
    if not found.continuations:
        stdout().print("nothing in the index follows the last two tokens of this text")
        return
    matched = found.continuations[0].match_length
    stdout().print(f"after {tokenizer.decode(ids[-matched:])!r} ({matched} tokens) came:", highlight=False, markup=False)
    for hit in found.continuations:
        stdout().print(f"{hit.count:6}  {tokenizer.decode(list(hit.tokens))!r}", highlight=False, markup=False)


def _resolve(model: str | None) -> ResolvedModel:
    """The named model, or the default one."""
    from cluster.checks.host import check_folder
    from cluster.models.target import resolve

    settings = settings_of(None, None, model=model)
    check_folder("cache_dir", settings.cache_dir)
    return resolve(settings.model, settings.cache_dir, say=stderr().print)
