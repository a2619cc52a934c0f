"""What tests decode with in place of a model: a toy target, a simulated clock, stages and ranks in threads."""
