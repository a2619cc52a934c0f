"""``python -m tour`` lists the chapters; ``python -m tour 3`` runs one, ``python -m tour all`` runs them all."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import tour
from tour.model import console

CHAPTERS = sorted(module.name for module in pkgutil.iter_modules(tour.__path__) if module.name.startswith("chapter"))


def main(arguments: list[str]) -> int:
    chapters = {str(number): name for number, name in enumerate(CHAPTERS, 1)}
    if not arguments or arguments[0] in ("-h", "--help"):
        console.print("Outrider in one sitting. Each chapter is a file to read, and then to run:\n")
        for number, name in chapters.items():
            title, _, _ = (importlib.import_module(f"tour.{name}").__doc__ or "").partition("\n")
            console.print(f"python -m tour {number}   tour/{name}.py\n    {title}\n", markup=False)
        console.print("`python -m tour all` runs them all, in about a minute.")
        return 0
    wanted = list(chapters) if arguments == ["all"] else arguments
    if unknown := [each for each in wanted if each not in chapters]:
        console.print(f"no such chapter: {unknown[0]}; there are 1 to {len(chapters)}, and `all`", markup=False)
        return 2
    for number in wanted:
        console.rule(f"Chapter {number}")
        importlib.import_module(f"tour.{chapters[number]}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
