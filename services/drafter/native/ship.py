"""Compiles the text drafters' code into the package, for machines without a compiler.

``python -m services.drafter.native.ship``
"""

from __future__ import annotations

from services.drafter.native.library import ship


def main() -> None:
    """Compile it, and print the file."""
    print(ship())


if __name__ == "__main__":
    main()
