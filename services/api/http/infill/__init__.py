"""llama-server's /infill: text for a gap, by models whose tokenizer has fill-in-the-middle tokens."""
