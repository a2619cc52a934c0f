"""Compiles the kernels into the package, for machines without a compiler.

``python -m services.verifier.kernels.native.ship``
"""

from __future__ import annotations

from services.verifier.kernels.native.library import ship


def main() -> None:
    """Compile them, and print the files."""
    for file in ship():
        print(file)


if __name__ == "__main__":
    main()
