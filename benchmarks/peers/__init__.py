"""Other engines, each run as a script in an environment of its own. Files keep their prefix: ``vllm.py`` would hide vLLM."""
