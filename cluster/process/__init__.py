"""What concerns the process: its logs and numbers, signals and garbage, the terminal, and the whole service within it."""
