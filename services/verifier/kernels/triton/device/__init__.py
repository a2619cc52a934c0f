"""What runs on the GPU. Triton compiles these functions from their source; mypy does not know their language."""
