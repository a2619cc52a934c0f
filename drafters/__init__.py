"""Weights of drafters that come with Outrider: ``MODEL/SOURCE`` holds those of one source for the target of that name."""
