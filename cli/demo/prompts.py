"""What the demo asks. The answer to ``EDIT`` was read: the default model does what it is asked."""

from __future__ import annotations

EDIT = """Rename the class Stack to Pile and print the whole program again:

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]
```"""
OPEN = "Explain in a few sentences why the sky is blue."
