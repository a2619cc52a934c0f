"""What the client tells its user: every option is described, a misspelt one finds its name, the README's examples run."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path

import grpc.aio
import pytest

import outrider
from outrider.requests import Options, build_request
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc
from tests.refusals import refuses

SDK = Path(__file__).parents[2] / "sdk"


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


def test_the_version_is_the_package_s() -> None:
    assert outrider.__version__ == tomllib.loads((SDK / "pyproject.toml").read_text())["project"]["version"]


class Parrot(generation_pb2_grpc.GenerationServiceServicer):
    """Answers with its prompt."""

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        yield pb.GenerateResponse(chunk=pb.Chunk(text=request.prompt or request.messages.messages[0].content, token_ids=[1]))
        yield pb.GenerateResponse(complete=pb.Complete(finish_reason=pb.FINISH_REASON_STOP))


async def test_the_examples_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Parrot(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", (SDK / "README.md").read_text(), re.MULTILINE)
    examples = [re.sub("^    ", "", block, flags=re.MULTILINE) for block in blocks if "import" in block]
    assert len(examples) == 3
    for example in examples:
        code = compile(example.lstrip().replace("127.0.0.1:50051", f"127.0.0.1:{port}"), "README.md", "exec")
        await asyncio.to_thread(exec, code, {})
    await server.stop(None)
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Once upon a time", "Hello!", "a fox", "a dog", "The quick brown"))
