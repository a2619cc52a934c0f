"""Compiles the engine's code into the package, for machines without a compiler.

``python -m services.verifier.engine.native.ship``
"""

from __future__ import annotations

from services.verifier.engine.native.library import ship


def main() -> None:
    """Compile it, and print the file."""
    print(ship())


if __name__ == "__main__":
    main()
