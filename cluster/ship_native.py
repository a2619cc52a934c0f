"""Compiles all C code into the installed packages, for images whose machines have no compiler.

``python -m cluster.ship_native``
"""

from __future__ import annotations

from services.drafter.native import library as drafting
from services.verifier.engine.native import library as deciding
from services.verifier.kernels.native import library as kernels


def main() -> None:
    """Compile it, and print the files."""
    for file in (*kernels.ship(), drafting.ship(), deciding.ship()):
        print(file)


if __name__ == "__main__":
    main()
