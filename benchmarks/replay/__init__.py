"""``outrider replay``: drafters on recorded answers, without a model."""
