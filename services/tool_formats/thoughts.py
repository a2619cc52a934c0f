"""The marks between which models think before they answer."""

from __future__ import annotations

from services.tool_formats import harmony

# By name: what begins a thought, and what ends it. In harmony it is a message.
THOUGHTS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "bracketed_think": ("[THINK]", "[/THINK]"),
    "seed_think": ("<seed:think>", "</seed:think>"),
    "start_thinking": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "start_think": ("<|think_start|>", "<|think_end|>"),
    "diamond_think": ("◁think▷", "◁/think▷"),
    harmony.NAME: (harmony.CHANNEL + "analysis" + harmony.MESSAGE, harmony.END),
}
