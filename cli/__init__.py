"""The command line, which may import everything else."""
