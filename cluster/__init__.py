"""The only place that knows what runs where: configuration, composition, Ray Serve."""
