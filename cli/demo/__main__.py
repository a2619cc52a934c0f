"""``make demo``: four acts, a table, and a page that stays open until Enter is pressed."""

from __future__ import annotations

import os
import sys
import time

from rich.console import Console

from cli.demo import acts
from cli.demo.measuring import measure_all
from cli.demo.on_ray import RayService
from cluster.process.signals import stop_on_signals
from cluster.process.starting import begin_starting
from cluster.process.terminal import end_with


def main() -> None:
    """Run the demo."""
    begin_starting()
    stop_on_signals()
    try:
        _run(Console(highlight=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        end_with(error)


def _run(console: Console) -> None:
    began = time.perf_counter()
    found = measure_all(console)
    # Nothing is measured from here on, so Ray may start while people look.
    with RayService() as service:
        acts.race(console, found)
        acts.lies(console, found)
        acts.open_question(console, found)
        killed = acts.kill(console, found, service)
        console.print(acts.table(found, killed))
        console.print(f"Done in {time.perf_counter() - began:.0f} s.")
        if sys.stdin.isatty() and not os.environ.get("CI"):
            console.print(f"The service is at [bold]{service.addresses().page}[/bold] until you press Enter.")
            sys.stdin.readline()


if __name__ == "__main__":
    main()
