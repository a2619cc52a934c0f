"""When a chain of drafted tokens ends: policies that a draft model asks after each of its tokens. numpy only, no torch."""
