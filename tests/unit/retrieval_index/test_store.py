"""Versions in Redis, against real servers: publish, promote, roll back; damage, refusals, two publishers, users and TLS."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
import trustme

from retrieval_index.access import PUBLISHER, READER, rules, without_password
from retrieval_index.cache_folder import is_whole
from retrieval_index.embedded import embedded_redis
from retrieval_index.index import open_index
from retrieval_index.manifest import read_manifest
from retrieval_index.store import IndexStore
from speculation.errors import ConfigurationError, Unavailable
from tests.drafters.indexes import build
from tests.running.patience import PATIENCE_S
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.redis_servers import KINDS, server, started

# Opens the store of a URL, and of a name.
Connect = Callable[..., IndexStore]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with server(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens stores, which are closed when the test ends."""
    with ExitStack() as stores:
        # Small pieces, so that small indexes have several.
        yield lambda url, name="i": stores.enter_context(IndexStore(url, name, piece_bytes=100))


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    """Another one than the store's."""
    with redis.Redis.from_url(url) as connected:
        yield connected


@pytest.fixture
def indexes(tmp_path: Path) -> list[Path]:
    """Three small ones."""
    folders = [tmp_path / f"index{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        build(folder, [f"text number {number} and more"])
    return folders


def test_versions_come_and_go(url: str, indexes: list[Path], tmp_path: Path, connect: Connect, client: redis.Redis) -> None:
    store = connect(url)
    assert store.live() is None
    assert store.versions() == []
    one, two, three = (read_manifest(folder).version for folder in indexes)
    assert store.publish(indexes[0]) == one
    change = store.last_change()
    assert store.publish(indexes[1], promote=False) == two
    assert store.live() == one
    assert store.wait_for_change(change, 0.1) is None
    store.promote(two)
    assert store.wait_for_change(change, PATIENCE_S) is not None
    assert [(each.version, each.live) for each in store.versions()] == [(two, True), (one, False)]
    assert store.rollback() == one
    assert store.live() == one
    fetched = store.fetch(one, tmp_path / "cache")
    assert open_index(fetched).manifest.version == one
    assert store.fetch(one, tmp_path / "cache") == fetched
    # The live one and the one before it are kept.
    store.publish(indexes[2])
    assert {each.version for each in store.versions()} == {three, one}
    with refuses(ConfigurationError, two, says="no version"):
        store.fetch(two, tmp_path / "cache")
    with refuses(ConfigurationError, field="x"):
        store.promote("x")
    assert not [key for key in client.scan_iter() if two.encode() in key]
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_password_beside_the_url(url: str, indexes: list[Path]) -> None:
    parts = urlsplit(url)
    bare = f"redis://{parts.hostname}:{parts.port}"
    with IndexStore(bare, "i", parts.password) as store:
        store.publish(indexes[0])
        assert store.live() == read_manifest(indexes[0]).version
    for wrong in (None, "wrong"):
        with IndexStore(bare, "i", wrong) as store, pytest.raises(Unavailable) as refused:
            store.live()
        assert "wrong" not in str(refused.value)


def test_a_version_that_is_not_live_can_be_deleted(
    url: str, indexes: list[Path], connect: Connect, client: redis.Redis
) -> None:
    store = connect(url)
    one = store.publish(indexes[0])
    two = store.publish(indexes[1], promote=False)
    store.delete(two)
    assert [each.version for each in store.versions()] == [one]
    assert not [key for key in client.scan_iter() if two.encode() in key]
    with refuses(ConfigurationError, one, says="is live"):
        store.delete(one)
    with refuses(ConfigurationError, two, says="no version"):
        store.delete(two)
    # What has been deleted cannot be rolled back to.
    store.publish(indexes[1])
    store.delete(one)
    with refuses(ConfigurationError, field="i"):
        store.rollback()


def test_names_are_apart(url: str, indexes: list[Path], connect: Connect) -> None:
    connect(url, "a").publish(indexes[0])
    assert connect(url, "b").live() is None
    with refuses(ConfigurationError, field="a"):
        connect(url, "a").rollback()


@pytest.mark.parametrize("what", ["part", "short", "missing", "manifest"])
def test_what_was_altered_in_redis_is_refused(
    url: str, indexes: list[Path], tmp_path: Path, what: str, connect: Connect, client: redis.Redis
) -> None:
    store = connect(url)
    version = store.publish(indexes[0])
    part = f"outrider:{{i}}:part:{version}:ngrams.marisa:0"
    content = client.get(part)
    assert isinstance(content, bytes)
    if what == "part":
        client.set(part, content[:-1] + bytes([content[-1] ^ 1]))
    elif what == "short":
        client.set(part, content[:-1])
    elif what == "missing":
        client.delete(part)
    else:
        client.set(f"outrider:{{i}}:manifest:{version}", store.manifest(version).to_json().replace('"tiny"', '"evil"'))
    with refuses(ConfigurationError, version if what == "manifest" else "ngrams.marisa"):
        store.fetch(version, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


def test_a_damaged_index_is_not_published(url: str, indexes: list[Path], connect: Connect) -> None:
    (indexes[0] / "counts.bin").write_bytes(b"x")
    with refuses(ConfigurationError, field="index0/counts.bin"):
        connect(url).publish(indexes[0])
    assert connect(url).live() is None


def test_two_publishers_wait_for_each_other(url: str, indexes: list[Path], connect: Connect) -> None:
    slow = connect(url)
    began, refused = threading.Event(), threading.Event()

    def dawdle(part: str, done: int, total: int) -> None:
        began.set()
        assert refused.wait(PATIENCE_S)

    first = threading.Thread(target=lambda: slow.publish(indexes[0], advance=dawdle))
    first.start()
    began.wait()
    with pytest.raises(Unavailable, match="another publisher"):
        connect(url).publish(indexes[1], patience_s=0.0)
    refused.set()
    second = connect(url).publish(indexes[1])
    first.join()
    store = connect(url)
    assert store.live() == second
    assert len(store.versions()) == 2


def test_a_publisher_that_lost_its_turn_leaves_the_live_index_alone(
    url: str, indexes: list[Path], connect: Connect, client: redis.Redis
) -> None:
    store = connect(url)
    live = store.publish(indexes[0])

    def steal(part: str, done: int, total: int) -> None:
        client.set("outrider:{i}:publisher", "somebody else")

    with pytest.raises(Unavailable, match="untouched"):
        store.publish(indexes[1], advance=steal)
    assert store.live() == live


def test_no_redis_a_wrong_password_a_wrong_url(indexes: list[Path], tmp_path: Path, connect: Connect) -> None:
    with pytest.raises(Unavailable, match="redis://127"):
        connect(f"redis://127.0.0.1:{free_port()}").publish(indexes[0])
    with server("embedded", tmp_path) as url:
        wrong = url.replace(url.split(":")[2].split("@")[0], "wrong")
        with pytest.raises(Unavailable, match="password") as error:
            connect(wrong).live()
        assert "wrong" not in str(error.value).replace("WRONGPASS", "")
    with refuses(ConfigurationError, field="http://x"):
        connect("http://x")
    for shown, given in (
        ("rediss://***@h:1/0", "rediss://me:secret@h:1/0?password=secret"),
        ("redis://h:1", "redis://h:1"),
        ("redis://***@[::1]:1", "redis://:secret@[::1]:1"),
    ):
        assert without_password(given) == shown
    for odd in ("redis://:secret/x@h:1", "redis://:secret#x@h:1", "redis://:secret[x@h:1", "redis://h:secret"):
        assert "secret" not in without_password(odd)
        with pytest.raises((ConfigurationError, Unavailable)) as refused:
            connect(odd).live()
        assert "secret" not in str(refused.value)


def test_an_unknown_option_of_the_url_is_said(connect: Connect) -> None:
    with refuses(ConfigurationError, field="redis://127.0.0.1:1"):
        connect("redis://127.0.0.1:1?sssl=1").live()


def test_the_embedded_server_keeps_its_data_where_it_is_told_to(
    indexes: list[Path], tmp_path: Path, connect: Connect
) -> None:
    folder = tmp_path / "redis"
    folder.mkdir()
    with embedded_redis(folder) as url:
        version = connect(url).publish(indexes[0])
    with embedded_redis(folder) as url:
        assert connect(url).live() == version


def test_a_damaged_copy_is_fetched_again(url: str, indexes: list[Path], tmp_path: Path, connect: Connect) -> None:
    store = connect(url)
    version = store.publish(indexes[0])
    folder = store.fetch(version, tmp_path / "cache")
    (folder / "counts.bin").write_bytes(b"x")
    assert open_index(store.fetch(version, tmp_path / "cache"))
    (folder / "manifest.json").unlink()
    assert open_index(store.fetch(version, tmp_path / "cache"))


def test_a_copy_that_cannot_be_read_is_not_thrown_away(
    url: str, indexes: list[Path], tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cache = connect(url), tmp_path / "cache"
    version = store.publish(indexes[0])
    folder = store.fetch(version, cache)

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", none_left)
        patched.setattr(Path, "read_bytes", none_left)
        with pytest.raises(Unavailable, match="Too many open files"):
            store.fetch(version, cache)
    assert is_whole(folder, version)


def test_what_an_interrupted_publisher_left_is_swept(
    url: str, indexes: list[Path], connect: Connect, client: redis.Redis
) -> None:
    client.set("outrider:{i}:part:0123456789abcdef:ngrams.marisa:0", b"left")
    connect(url).publish(indexes[0])
    assert not client.exists("outrider:{i}:part:0123456789abcdef:ngrams.marisa:0")


def test_what_is_deleted_meanwhile_does_not_become_live(url: str, indexes: list[Path], connect: Connect) -> None:
    store = connect(url)
    versions = [store.publish(folder) for folder in indexes]
    with refuses(ConfigurationError, says="no version"):
        store.promote(versions[0])
    assert store.live() == versions[2]
    assert store.rollback() == versions[1]


def of_user(url: str, user: str) -> str:
    """The same server for a user that is called as its password is."""
    return urlsplit(url)._replace(netloc=f"{user}:{user}@{urlsplit(url).netloc.rpartition('@')[2]}").geturl()


def commands_called(client: redis.Redis) -> set[str]:
    """The commands that the server has run since the last call, but for those of a connection."""
    found = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    client.config_resetstat()
    return {name for name in found if not name.startswith(("client|", "acl|", "config|")) and name not in _OF_CONNECTIONS}


_OF_CONNECTIONS = {"auth", "hello", "info", "ping", "client", "acl", "config"}


def test_a_reader_and_a_publisher_have_users_of_their_own(
    url: str,
    indexes: list[Path],
    tmp_path: Path,
    connect: Connect,
    client: redis.Redis,
) -> None:
    """Each needs every command of its rules, and no other; neither can touch anything else, nor a reader change anything."""
    for user, commands in (("reader", READER), ("publisher", PUBLISHER)):
        client.execute_command("ACL", "SETUSER", user, "on", f">{user}", *rules(commands, "i").split())
    publisher, reader = connect(of_user(url, "publisher")), connect(of_user(url, "reader"))
    client.set("of somebody else", "x")
    client.set("outrider:{another}:live", "x")
    client.config_resetstat()

    one, two = publisher.publish(indexes[0]), publisher.publish(indexes[1])
    assert publisher.rollback() == one
    publisher.promote(two)
    three = publisher.publish(indexes[2], promote=False)
    publisher.delete(three)
    assert [each.version for each in publisher.versions()] == [two, one]
    # An interrupted upload leaves pieces, which the next one sweeps; one that has lost its turn gives up what it watches.
    client.set(f"outrider:{{i}}:part:{'0' * 64}:trie:0", "x")
    with pytest.raises(Unavailable, match="taken over"):
        publisher.publish(indexes[0], advance=lambda *_: client.set("outrider:{i}:publisher", "another", px=1))
    assert commands_called(client) - set(READER) == set(PUBLISHER) - set(READER)

    change = reader.last_change()
    assert reader.live() == two and reader.history() == [two, one]
    assert open_index(reader.fetch(two, tmp_path / "cache"))
    assert reader.wait_for_change("0", PATIENCE_S) == change
    assert commands_called(client) == set(READER)
    for forbidden in (
        lambda: reader.publish(indexes[2]),
        lambda: reader.promote(one),
        lambda: reader.rollback(),
        lambda: reader.delete(one),
        lambda: reader.versions(),
        lambda: connect(of_user(url, "reader"), "another").live(),
        lambda: connect(of_user(url, "publisher"), "another").live(),
    ):
        with pytest.raises(Unavailable, match="permission"):
            forbidden()
    for user in ("reader", "publisher"):
        with redis.Redis.from_url(of_user(url, user)) as own:
            for command in (
                ("GET", "of somebody else"), ("KEYS", "*"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST"),
                ("CLIENT", "LIST"), ("EVAL", "return 1", "0"), ("SUBSCRIBE", "x"), ("MONITOR",), ("SHUTDOWN",),
            ):  # fmt: skip
                with pytest.raises(redis.exceptions.NoPermissionError):
                    own.execute_command(*command)
    assert reader.live() == two


def test_the_page_has_the_rules() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "retrieval.md").read_text(encoding="utf-8")
    for user, commands in (("reader", READER), ("publisher", PUBLISHER)):
        assert f"ACL SETUSER {user} on >PASSWORD {rules(commands, 'default')}\n" in page


def test_an_index_travels_by_tls(indexes: list[Path], tmp_path: Path, connect: Connect) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    for name, blob in (
        ("ca", authority.cert_pem),
        ("cert", certificate.cert_chain_pems[0]),
        ("key", certificate.private_key_pem),
    ):
        blob.write_to_path(tmp_path / f"{name}.pem")
    port = free_port()
    url = f"rediss://:secret@127.0.0.1:{port}?ssl_ca_certs={tmp_path / 'ca.pem'}"
    files = [word for name in ("cert", "key") for word in (f"--tls-{name}-file", str(tmp_path / f"{name}.pem"))]
    options = ["--port", "0", "--tls-port", str(port), *files, "--tls-ca-cert-file", str(tmp_path / "ca.pem")]
    with started(tmp_path, url, *options, "--tls-auth-clients", "no", "--requirepass", "secret"):
        assert connect(url).publish(indexes[0]) == connect(url).live()
        with pytest.raises(Unavailable, match="certificate verify failed"):
            connect(url.partition("?")[0]).live()
