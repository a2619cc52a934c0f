"""Quantised safetensors: how a checkpoint's codes and scales stand for the weights of a float model."""
