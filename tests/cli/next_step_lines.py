"""What commands say next, as whoever pastes it reads it."""

from __future__ import annotations


def commands_of(text: str) -> list[str]:
    """The command of every way behind the last "next"; what they do stands below each of them."""
    first, *rest = text.rpartition("next: ")[2].split("\n")
    return [first, *(line.strip()[4:] for line in rest if line.strip().startswith("or: "))]


def flat(text: str) -> str:
    """In one line, for who asks only what is said."""
    return " ".join(text.split())
