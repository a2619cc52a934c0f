"""What changes while a verifier serves: its weights and its adapters."""
