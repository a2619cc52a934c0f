"""The tasks of ``make demo``, each with the strategies it is meant for."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = "autoregressive"
MAX_TOKENS = 160

_PROGRAM = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
"""

# A code base to retrieve from. It does not contain the requested class, but similar ones.
CODE_BASE = """class Vector:
    def __init__(self, x, y, z):
        self.x = x
        self.y = y
        self.z = z

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y, self.z + other.z)

    def __sub__(self, other):
        return Vector(self.x - other.x, self.y - other.y, self.z - other.z)

    def __eq__(self, other):
        return self.x == other.x and self.y == other.y and self.z == other.z

    def __repr__(self):
        return f"Vector({self.x}, {self.y}, {self.z})"


class Size:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __mul__(self, other):
        return Size(self.x * other.x, self.y * other.y)

    def __repr__(self):
        return f"Size({self.x}, {self.y})"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A request.

    Attributes:
        message: the user's message.
        strategies: strategies besides plain decoding and blend, each with a remark for the reader.
    """

    name: str
    message: str
    strategies: dict[str, str]


TASKS = (
    Task(
        name="edit",
        message=f"Rename the class Account to Wallet and print the whole program again:\n\n```python\n{_PROGRAM}```",
        strategies={
            "prompt_lookup": "the answer repeats the prompt, so the words that followed there are right, many at once"
        },
    ),
    Task(
        name="write",
        message=(
            "Write a Python class Point with fields x and y, and methods __add__, __sub__, __mul__, __eq__ and __repr__."
        ),
        strategies={
            "suffix": "nothing to copy at first; each method resembles the one before, so it speeds up",
            "rest": "the index holds a small code base with classes like this one: drafts from its first line on",
        },
    ),
    Task(
        name="explain",
        message="Explain in three sentences why the sky is blue.",
        strategies={
            "fspad": "nothing repeats; a small head, trained on this model's own text, guesses from its hidden states, "
            "and is left out where that costs more than it brings"
        },
    ),
)
ABOUT_PLAIN = "one token per pass; all others are compared with it, token for token"
ABOUT_BLEND = "all sources in one tree; it learns which to trust, and asks them as often as pays"
