"""``outrider bench stopping``: policies for the length of drafts, compared with each other."""
