"""The machine that this process runs on: its processor and memory, its compiler, its files and its sockets."""
