"""What stands between two marks in a text that a model wrote, in time linear in its length.

A regular expression such as `<answer>(.*?)</answer>` looks for the end anew from every beginning: a text of a hundred
thousand beginnings and no end keeps it busy for minutes, and with it every episode on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator


def spans(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """`(start, end)` of what stands between each `opening` and the next `closing`, from left to right."""
    position = 0
    while True:
        start = text.find(opening, position)
        if start < 0:
            return
        end = text.find(closing, start + len(opening))
        if end < 0:
            return  # nor has any later beginning an end
        yield start + len(opening), end
        position = end + len(closing)


def last_between(text: str, opening: str, closing: str) -> str | None:
    """What the last pair of marks holds, or None. Of several beginnings before one end the last counts."""
    found = None
    for start, end in spans(text, opening, closing):
        found = text[max(start, text.rfind(opening, start, end) + len(opening)) : end]
    return found


def last_fenced(text: str) -> str | None:
    """What the last fenced code block holds, without its first line's language; None when there is no block."""
    found = None
    for start, end in spans(text, "```", "```"):
        _, newline, body = text[start:end].partition("\n")
        if newline:
            found = body
    return found


def without(text: str, opening: str, closing: str) -> str:
    """`text` with a space in place of every pair of marks and what it holds."""
    kept, position = [], 0
    for start, end in spans(text, opening, closing):
        kept.append(text[position : start - len(opening)])
        position = end + len(closing)
    return " ".join([*kept, text[position:]])
