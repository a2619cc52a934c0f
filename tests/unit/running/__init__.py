"""How the tests themselves run."""
