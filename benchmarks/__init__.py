"""What users run to measure: ``outrider bench``, ``replay`` and ``stopping``, many-GPU plans, checks of a GPU."""
