"""Settings, processes and Ray."""
