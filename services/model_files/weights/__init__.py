"""A model's weights as they lie in its folder: safetensors, or the blocks of a GGUF file."""
