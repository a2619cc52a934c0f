"""What the client tells its user: every option is described, a misspelt one finds its name, the README's examples run."""

from __future__ import annotations

import asyncio
import re
import runpy
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from typing_extensions import override

import outrider
from outrider.requests import Options, build_request
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc
from tests.running.refusals import refuses

SDK = Path(__file__).parents[3] / "sdk"


@pytest.mark.parametrize("client", [outrider.Client, outrider.AsyncClient])
def test_every_argument_is_described(client: type[outrider.Client] | type[outrider.AsyncClient]) -> None:
    described = re.findall(r"^ +(\w+): ", client.generate.__doc__ or "", re.MULTILINE)
    inputs = ["prompt", "messages", "token_ids", "timeout_s", "request_id", "traceparent"]
    assert described == [*inputs, *Options.__annotations__, "OutriderError"]


def test_a_misspelt_option_finds_its_name() -> None:
    with refuses(outrider.InvalidArgument, field="temprature") as caught:
        build_request("x", None, None, {"temprature": 0.5})  # type: ignore[typeddict-unknown-key]
    assert caught.value.field == "temprature"
    with refuses(outrider.InvalidArgument, field="xyz"):
        build_request("x", None, None, {"xyz": 1})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 10**5000), ("seed", "x" * 10**6), ("temperature", 10**400)],
    ids=["digits", "text", "no float"],
)
def test_a_wrong_value_is_shown_in_short(name: str, value: object) -> None:
    with refuses(outrider.InvalidArgument, field=name, says="number") as caught:
        build_request("x", None, None, {name: value})  # type: ignore[misc]
    assert len(caught.value.value) <= 80


def test_the_version_is_the_package_s() -> None:
    assert outrider.__version__ == tomllib.loads((SDK / "pyproject.toml").read_text())["project"]["version"]


class Silent(generation_pb2_grpc.GenerationServiceServicer):
    """Never answers."""

    @override
    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        await asyncio.sleep(3600)
        yield pb.GenerateResponse()


class Parrot(generation_pb2_grpc.GenerationServiceServicer):
    """Answers with its prompt, or with JSON where that is asked for."""

    @override
    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        if request.sampling.structured_outputs.json:
            yield pb.GenerateResponse(chunk=pb.Chunk(text='{"city": "Oslo", "country": "Norway"}', token_ids=[1]))
            yield pb.GenerateResponse(complete=pb.Complete(finish_reason=pb.FINISH_REASON_STOP))
            return
        yield pb.GenerateResponse(chunk=pb.Chunk(text=request.prompt or request.messages.messages[0].content, token_ids=[1]))
        yield pb.GenerateResponse(complete=pb.Complete(finish_reason=pb.FINISH_REASON_STOP))


@asynccontextmanager
async def serving(answering: generation_pb2_grpc.GenerationServiceServicer) -> AsyncIterator[str]:
    """The address of a server with these answers."""
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(answering, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


EXAMPLES = {
    "answer": "Once upon a time",
    "conversation": "> Which of them is the longest?",
    "many_at_once": "a crow",
    "structured": "{'city': 'Oslo', 'country': 'Norway'}",
    "strategies": "the same tokens: True",
}


def test_every_example_is_run() -> None:
    assert EXAMPLES.keys() == {path.stem for path in (SDK / "examples").glob("*.py")}


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(Parrot()) as address:
        monkeypatch.setattr("sys.argv", [name, address])
        await asyncio.to_thread(runpy.run_path, str(SDK / "examples" / f"{name}.py"), {}, "__main__")
    assert EXAMPLES[name] in capsys.readouterr().out


async def test_the_http_port_is_named_where_grpc_is_meant() -> None:
    async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak_http, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, outrider.AsyncClient(f"127.0.0.1:{port}", retry=outrider.Retry(attempts=1)) as client:
        with pytest.raises(outrider.Unavailable, match=f"127.0.0.1:{port} is no gRPC server, but speaks HTTP"):
            await client.generate("Once upon a time", timeout_s=20)


async def test_closing_an_asyncio_client_cancels_its_calls() -> None:
    async with serving(Silent()) as address:
        client = outrider.AsyncClient(address)
        call = asyncio.create_task(client.generate("Once upon a time"))
        await asyncio.sleep(0.2)
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_the_examples_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", (SDK / "README.md").read_text(), re.MULTILINE)
    examples = [re.sub("^    ", "", block, flags=re.MULTILINE) for block in blocks if "import" in block]
    assert len(examples) == 3
    fenced = re.findall(r"^```python\n(.*?)^```", (SDK.parent / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    examples += [block for block in fenced if "from outrider import" in block]
    assert len(examples) == 4
    async with serving(Parrot()) as address:
        for example in examples:
            code = compile(example.lstrip().replace("127.0.0.1:50051", address), "README.md", "exec")
            await asyncio.to_thread(exec, code, {})
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Once upon a time", "Hello!", "a fox", "a dog", "The quick brown"))
