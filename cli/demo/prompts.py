"""What the demo asks. The answers to ``COPY`` were read: the default model does the task, to the letter."""

from __future__ import annotations

COPY = """Print this program again:

```python
def celsius(fahrenheit):
    return (fahrenheit - 32) * 5 / 9

def kilometres(miles):
    return miles * 1.609344

def kilograms(pounds):
    return pounds * 0.45359237

def litres(gallons):
    return gallons * 3.785411784
```"""
OPEN = "Explain in a few sentences why the sky is blue."
