"""Settings of a service: a YAML file, environment variables, flags."""
