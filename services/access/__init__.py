"""Who may call, how often and how much: API keys, their limits and the record of their use. Knows no transport."""
