"""What concerns the process itself: its logs and numbers, signals and garbage, the terminal, and the service that it holds."""
