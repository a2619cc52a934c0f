"""Short trainings on tiny targets."""
