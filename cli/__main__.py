"""``python -m cli``: the same as ``outrider``."""

from cli.main import main

main()
