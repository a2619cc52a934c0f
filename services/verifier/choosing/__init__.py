"""From logits to the target's choice: logits processors, and the choice itself."""
