"""What concerns the process itself: its logs, signals, ports, and what it says on the terminal."""
