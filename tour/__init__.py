"""Outrider in one sitting: eight chapters, each a file to read and to run (``python -m tour``)."""
