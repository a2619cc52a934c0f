"""The service in this process, which stops between two passes when told to.

Run as ``python -m benchmarks.never_slower.held_service``, it answers each line of its input with a line. The first one has
the model's name and folder and the settings, as JSON; the answer is where it serves, or why it does not. Then come ``hold``,
answered once no pass is under way, and ``go``. It ends when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from cluster.models.target import ResolvedModel
from cluster.process.logs import quiet_libraries, start_logging
from cluster.process.starting import begin_starting
from cluster.settings.config import Settings
from speculation.errors import ConfigurationError

HELD, GOING = "held", "going"


def written(settings: Settings, model: ResolvedModel) -> str:
    """The first line of its input."""
    return json.dumps({"name": model.name, "path": str(model.path), "settings": settings.model_dump(mode="json")})


async def _serve(first: str) -> None:
    from cluster.build import in_process
    from cluster.entry.public import opened_entry

    given = json.loads(first)
    settings = Settings.model_validate(given["settings"])
    start_logging(settings.logging)
    model = ResolvedModel(name=given["name"], path=Path(given["path"]))
    async with (
        in_process(settings, model) as running,
        opened_entry(running.router, settings, running.observing) as addresses,
    ):
        _say({"address": addresses.grpc})
        hold = running.verifier.loop.hold
        while order := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if order == "hold":
                await hold.begin()
            else:
                hold.end()
            _say(HELD if order == "hold" else GOING)


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Run it."""
    begin_starting()
    quiet_libraries()
    try:
        asyncio.run(_serve(sys.stdin.readline()))
    except ConfigurationError as error:
        _say({"error": str(error)})


if __name__ == "__main__":
    main()
