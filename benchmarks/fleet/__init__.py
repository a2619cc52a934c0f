"""A fleet of verifiers on a simulated clock: traffic of a day, replicas, what Ray Serve does, plans for many GPUs."""
