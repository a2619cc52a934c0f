"""The target model, its key-value pool, and the service around the decoding loop."""
