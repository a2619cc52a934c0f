"""The target and the models that draft for it: from a name to a folder that can be loaded."""
