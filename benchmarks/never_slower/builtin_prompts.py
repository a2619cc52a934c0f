"""Prompts that are made on the spot, so that a kind never runs out of fresh ones.

Prompt number n of a kind is always the same text, and neighbours differ in what is asked as well as in names and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

_TOPICS = (
    "tides", "sourdough bread", "night trains", "lighthouses", "compound interest", "glaciers", "chess openings",
    "beekeeping", "the printing press", "solar panels", "coral reefs", "public libraries", "earthquakes", "bicycles",
    "vaccines", "jazz", "composting", "map projections", "volcanoes", "the water cycle", "optical illusions", "cheese",
    "migrating birds", "bridges", "sleep", "paper making", "elections", "fermentation", "black holes", "gardening in shade",
    "city trees", "clockwork", "weather forecasts", "rivers", "antibiotics", "knots", "satellites", "dialects", "markets",
    "tunnels", "wool", "photosynthesis", "harbours", "recycling glass", "mountain huts", "comets", "ceramics", "canals",
    "silk", "owls",
)  # fmt: skip
_QUESTIONS = (
    "Explain {topic} to a curious ten-year-old.",
    "What do most people get wrong about {topic}?",
    "Give me a plan for learning about {topic} in one month.",
    "Write a short story in which {topic} play an unexpected part.",
    "Which three inventions changed {topic} most, and why?",
    "Argue for spending more public money on {topic}, then argue against it.",
    "Describe how {topic} may look in fifty years.",
    "Write a friendly email that invites a colleague to a talk on {topic}.",
    "What should a museum about {topic} show in its first room?",
    "Compare {topic} today with what they were two hundred years ago.",
    "Tell me about one person who spent a lifetime on {topic}.",
    "Which questions about {topic} are still open?",
)
_NAMES = (
    "Mara",
    "Tomas",
    "Ilse",
    "Pavel",
    "Noor",
    "Jonas",
    "Edda",
    "Ruben",
    "Sanna",
    "Kofi",
    "Lena",
    "Marek",
    "Aiko",
    "Omar",
)
_TOWNS = ("Velden", "Halbrook", "Tarnow", "Selwick", "Orsa", "Brunn", "Lisse", "Corvel", "Pellworth", "Hallin", "Easterby")
_THINGS = (
    "invoice",
    "parcel",
    "ticket",
    "sensor",
    "booking",
    "recipe",
    "vehicle",
    "account",
    "order",
    "member",
    "lesson",
    "route",
)
_FIELDS = ("name", "size", "price", "weight", "status", "owner", "colour", "created", "label", "count", "limit", "source")
_NEWS = (
    "The council of {town} voted {n} to {m} for a new {thing} office near the river.",
    "{name} and {other}, who run the workshop, expect {n} visitors a week.",
    "Work begins in {month} and is meant to take {m} months.",
    "Critics say that {n},000 euros are too much for a town of {m},000 people.",
    "A similar plan had failed in {town} {m} years ago, when the money ran out.",
    "\"We have waited for this since we were children,\" said {name}.",
    "According to the report, {n} percent of all {thing} requests came from {town}.",
    "{name} recalled how {other} once carried {m} boxes across the frozen lake.",
    "The bridge to {town} stays closed until {month}, and buses take another road.",
    "Nobody knows yet who will pay for the {n} lamps along the path.",
    "Last {month} the old hall was used for {m} concerts and one wedding.",
    "In the end {other} offered to store every {thing} without charge.",
)  # fmt: skip
_MONTHS = ("January", "March", "April", "June", "July", "September", "October", "November")
_SENTENCES = {
    "German": (
        "{name} wartet seit {n} Minuten vor dem Bahnhof von {town}, weil der Zug im Schnee stecken geblieben ist.",
        "Wer das Museum in {town} besuchen will, muss {m} Tage vorher bei {name} anrufen.",
        "Als {name} das Fenster öffnete, roch die ganze Straße nach frischem Brot und {n} Kinder blieben stehen.",
    ),
    "French": (
        "{name} attend depuis {n} minutes devant la gare de {town}, car le train est bloqué par la neige.",
        "Pour visiter le musée de {town}, il faut appeler {name} {m} jours à l'avance.",
        "Quand {name} ouvrit la fenêtre, toute la rue sentait le pain frais et {n} enfants s'arrêtèrent.",
    ),
    "Spanish": (
        "{name} espera desde hace {n} minutos delante de la estación de {town}, porque el tren quedó atrapado en la nieve.",
        "Quien quiera visitar el museo de {town} tiene que llamar a {name} con {m} días de antelación.",
        "Cuando {name} abrió la ventana, toda la calle olía a pan recién hecho y {n} niños se pararon.",
    ),
}
_FUNCTIONS = (
    "returns the {n} largest values of a list without sorting all of it",
    "groups a list of {thing} records by their {field} and adds up every {other_field}",
    "reads a CSV file of {thing}s and yields those whose {field} is above {n}",
    "merges two sorted lists of {thing}s by {field}, keeping {m} of each",
    "checks whether a text is a palindrome, leaving out every {m}th character",
    "retries a call up to {m} times, waiting {n} milliseconds longer each time",
    "counts how often each {field} occurs among the last {n} {thing}s",
    "finds the longest run of {thing}s with the same {field}",
)  # fmt: skip


def news(number: int) -> str:
    """A sentence of a made-up report."""
    dice = Random(f"news/{number}")
    return dice.choice(_NEWS).format(**_slots(dice))


def builtin_prompt(kind: str, number: int) -> str:
    """Prompt ``number`` of one of the kinds.

    Raises:
        KeyError: there is no such kind.
    """
    return _MAKERS[kind](number, Random(f"{kind}/{number}"))


def _slots(dice: Random) -> dict[str, object]:
    name, other = dice.sample(_NAMES, 2)
    field, other_field = dice.sample(_FIELDS, 2)
    return {
        "name": name, "other": other, "field": field, "other_field": other_field, "town": dice.choice(_TOWNS),
        "thing": dice.choice(_THINGS), "month": dice.choice(_MONTHS), "n": dice.randint(21, 98), "m": dice.randint(3, 19),
    }  # fmt: skip


def _open(number: int, dice: Random) -> str:
    # Every topic meets every question before a pair comes again.
    topic, lap = _TOPICS[number % len(_TOPICS)], number // len(_TOPICS)
    question = _QUESTIONS[(lap + 5 * number) % len(_QUESTIONS)]
    return f"{question.format(topic=topic)} Use about {dice.randint(60, 240)} words."


def _edits(number: int, dice: Random) -> str:
    slots = _slots(dice)
    thing, (first, second, third, renamed) = slots["thing"], dice.sample(_FIELDS, 4)
    title = str(thing).capitalize()
    program = (
        f"class {title}:\n"
        f'    """One {thing} of the shop in {slots["town"]}."""\n\n'
        f"    def __init__(self, {first}, {second}, {third}={slots['n']}):\n"
        f"        self.{first} = {first}\n        self.{second} = {second}\n        self.{third} = {third}\n\n"
        f"    def describe(self):\n"
        f'        return f"{thing} {{self.{first}}}: {second} {{self.{second}}}, {third} {{self.{third}}}"\n\n'
        f"    def is_above(self, limit={slots['m']}):\n        return self.{third} > limit\n\n\n"
        f"def largest({thing}s):\n    return max({thing}s, key=lambda {thing}: {thing}.{third})\n"
    )
    return (
        f"Here is a Python program:\n\n```python\n{program}```\n\nRename `{third}` to `{renamed}_{third}` everywhere and "
        "print the whole program again. Change nothing else."
    )


def _code(number: int, dice: Random) -> str:
    slots = _slots(dice)
    does = dice.choice(_FUNCTIONS).format(**slots)
    language = dice.choice(("Python", "JavaScript", "Go", "Rust"))
    return (
        f"Write a function in {language}, called {slots['thing']}_{slots['field']}_{slots['n']}, that {does}. "
        "Add a short comment and two examples of its use."
    )


def _summaries(number: int, dice: Random) -> str:
    report = " ".join(dice.choice(_NEWS).format(**_slots(dice)) for _ in range(dice.randint(9, 14)))
    return f"Summarize the following report in {dice.randint(2, 4)} sentences.\n\n{report}"


def _translation(number: int, dice: Random) -> str:
    language = dice.choice(tuple(_SENTENCES))
    text = " ".join(sentence.format(**_slots(dice)) for sentence in dice.sample(_SENTENCES[language], 2))
    return f"Translate {language} to English: {text}"


def _json(number: int, dice: Random) -> str:
    lines = []
    for place in range(dice.randint(3, 5)):
        slots = _slots(dice)
        lines.append(
            f"{place + 1}. {slots['name']} in {slots['town']} ordered {slots['m']} of {slots['thing']} type {slots['n']}, "
            f"to be sent in {slots['month']}, at {slots['n']}.{slots['m']} euros each."
        )
    fields = '"customer", "town", "count", "article", "month" and "price"'
    return "\n".join(lines) + f"\n\nWrite these orders as a JSON array of objects with the fields {fields}. Only the JSON."


_MAKERS: Mapping[str, Callable[[int, Random], str]] = {
    "open": _open,
    "edits": _edits,
    "code": _code,
    "summaries": _summaries,
    "translation": _translation,
    "json": _json,
}
