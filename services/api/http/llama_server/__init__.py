"""llama-server's /completion, and its /infill: text for a gap, by models whose tokenizer has fill-in-the-middle tokens."""
