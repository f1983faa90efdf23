"""What agents write can be printed: nothing in it reaches the terminal as a command."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.cli.info import show
from forge_env.types import Message
from forge_env.visible import one_line, shown, visible

HOSTILE = st.text() | st.text(st.sampled_from("\x1b[2J\r\n\x07\u202e\u2066\u200b\ud800\x9b\u0301\U000e0041a"))


def harmless(text: str) -> bool:
    """Nothing that a terminal obeys, turns round or can't encode."""
    kinds = {unicodedata.category(character) for character in text if character not in "\n\t"}
    turning = {unicodedata.bidirectional(character) for character in text} & {
        "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
    }  # fmt: skip
    return not kinds & {"Cc", "Cs", "Zl", "Zp"} and not turning


@given(text=HOSTILE)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = visible(text)
    assert harmless(shown)
    shown.encode()
    assert visible(shown) == shown
    assert harmless(one_line(text, 40))
    assert "\n" not in one_line(text, 40)
    assert len(one_line(text, 40)) <= 40


@given(text=HOSTILE)
def test_a_message_is_shown_without_harm(text: str) -> None:
    assert harmless(show(Message(role="tool", content=text), limit=None))


@given(
    text=st.text(st.characters(categories=["L", "N", "P", "S", "Zs"], exclude_characters="\u115f\u1160\u3164\uffa0"))
)
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("live\u202elive", "live\\u202elive"),
        ("100 %\rdone", "100 %\\rdone"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("half \ud800", "half \\ud800"),
        ("a\u2028b", "a\\u2028b"),
        ("Größe \U0001f40d \u05d0\u05d1", "Größe \U0001f40d \u05d0\u05d1"),
        ("e" + "\u0301" * 50, "e" + "\u0301" * 4),
    ],
)
def test_what_is_hidden_is_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown


SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text() | st.binary() | st.complex_numbers()
HASHABLE = st.recursive(SCALARS, lambda inner: st.lists(inner).map(tuple) | st.frozensets(inner), max_leaves=8)
VALUES = st.recursive(
    HASHABLE | st.sets(HASHABLE) | st.binary().map(bytearray),
    lambda inner: st.lists(inner) | st.dictionaries(HASHABLE, inner),
    max_leaves=8,
)


@given(value=VALUES, most=st.integers(4, 100))
def test_a_value_is_shown_as_python_writes_it_up_to_its_limit(value: Any, most: int) -> None:
    whole = repr(value)
    text = shown(value, most)
    assert text == (whole if len(whole) <= most else f"{text[:-3]}...")
    assert len(text) <= most
    assert "..." in text[-3:] or text == whole
    assert shown(value, len(whole)) == whole


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no")


def test_values_that_python_does_not_write_are_shown() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    circular: list[Any] = []
    circular.append(circular)
    assert shown(10**5000) == "<an integer of about 5001 digits>"
    assert shown([-(10**5000), 1]) == "[<an integer of about 5001 digits>, 1]"
    assert shown({10**9000: "x"}).startswith("{<an integer of about 9001")
    assert shown(deep, 10) == "[[[[[[[..."
    assert shown(circular, 10) == "[[[[[[[..."
    assert len(shown(circular, 1_000_000)) <= 1_000_000
    assert shown("x" * 10**7, 8) == "'xxxx..."
    assert shown([Broken()]) == "[<Broken>]"
