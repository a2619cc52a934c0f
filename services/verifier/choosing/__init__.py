"""From logits to the target's choice: processors, and the choice itself."""
