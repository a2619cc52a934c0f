"""How models write calls of tools in their answers, and the readers of each form."""
