"""Extraction of text between two markers in a model's output, in linear time.

A regular expression such as `<answer>(.*?)</answer>` searches for the end again from every start marker: a text with a
hundred thousand start markers and no end marker would block the event loop, and all its episodes, for minutes.
"""

from __future__ import annotations

from collections.abc import Iterator


def spans(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """`(start, end)` of the text between each `opening` and the next `closing`, from left to right."""
    position = 0
    while True:
        start = text.find(opening, position)
        if start < 0:
            return
        end = text.find(closing, start + len(opening))
        if end < 0:
            return  # no later start marker has an end marker either
        yield start + len(opening), end
        position = end + len(closing)


def last_between(text: str, opening: str, closing: str) -> str | None:
    """Text between the last pair of markers, or None. Of several start markers before an end marker the last counts."""
    content = None
    for start, end in spans(text, opening, closing):
        content = text[max(start, text.rfind(opening, start, end) + len(opening)) : end]
    return content


def last_fenced(text: str) -> str | None:
    """Content of the last fenced code block, without the language line; None if there is no block."""
    content = None
    for start, end in spans(text, "```", "```"):
        _, newline, body = text[start:end].partition("\n")
        if newline:
            content = body
    return content


def without(text: str, opening: str, closing: str) -> str:
    """Replace every pair of markers, and the text between them, by a space."""
    outside, position = [], 0
    for start, end in spans(text, opening, closing):
        outside.append(text[position : start - len(opening)])
        position = end + len(closing)
    return " ".join([*outside, text[position:]])
