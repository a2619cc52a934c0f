"""``python -m cli`` is the same as ``outrider``."""

from cli.main import main

main()
