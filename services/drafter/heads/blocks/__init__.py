"""Block drafters: one pass guesses a whole block of tokens (DFlash, 2602.06036; JetSpec's causal blocks)."""
