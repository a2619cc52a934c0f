"""Models that guess several tokens ahead at once, from one state of the target: Medusa's heads and speculative streams."""
