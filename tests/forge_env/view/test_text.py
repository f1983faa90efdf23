"""Texts of agents on a page: everything is shown, and nothing is more than text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.figures import ago, duration, number
from forge_env.view.text import HIDDEN, Vocabulary, arguments, code, pieces, plain, shown
from tests.forge_env.view.made import HOSTILE, TOKENIZER


@given(st.text(st.characters(), max_size=200))
def test_a_text_holds_no_markup_and_nothing_hidden(text: str) -> None:
    found = str(shown(text))
    found.encode()
    bare = found.replace('<span class="box" title="', "").replace("</span>", "")
    assert not HIDDEN.search(found)
    assert "<" not in bare


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_escaped_everywhere(text: str) -> None:
    shapes = [shown(text), code(text, "python"), *(part.text for part in pieces(f"a\n```python\n{text}\n```"))]
    shapes += [part.text for part in arguments(text)]
    for shape in shapes:
        str(shape).encode()
        assert "<script" not in shape
        assert "<img" not in shape
        assert "<svg" not in shape


def test_what_is_hidden_is_named() -> None:
    assert ">RLO\u00d72</span>x" in shown("\u202e\u202ex")
    assert ">ESC</span>]0;" in shown("\x1b]0;")
    assert ">U+D800</span>" in shown("\ud800")
    assert shown("a\r\nb\tc") == "a\r\nb\tc"
    assert "CR" in shown("a\rb")
    assert plain("\u202ea\ud800") == "\ufffda\ufffd"


def test_marks_that_pile_up_are_cut() -> None:
    assert len(shown("a" + "\u0301" * 10_000)) < 200
    assert shown("e\u0301") == "e\u0301"


def test_programs_are_highlighted_where_their_language_is_known() -> None:
    assert '<span class="hk">def</span>' in code("def f(): pass", "python")
    assert code("object A", "scala") == "object A"
    assert code("x" * 30_000, "python") == "x" * 30_000
    first, second, third = pieces("before\n```python\nx = 1\n```\nafter")
    assert (first.language, second.language, third.language) == (None, "python", None)
    assert "after" in third.text


def test_arguments_stand_one_by_one() -> None:
    found = arguments('{"code": "return 1", "n": 3}')
    assert [(part.name, part.language) for part in found] == [("code", "python"), ("n", "json")]
    assert arguments("[1")[0].name == "not a JSON object"
    assert arguments("[" * 100_000)[0].name == "not a JSON object"


def test_figures_are_short() -> None:
    assert [number(value) for value in (None, 0, 1204, 12_345, 0.25, 2e6)] == [
        "\u2013",
        "0",
        "1,204",
        "12.3k",
        "0.25",
        "2M",
    ]
    assert [duration(value, fine=True) for value in (0.12, 3.41, 59.99, 725, 11_400)] == [
        "120ms",
        "3.4s",
        "1m00s",
        "12m05s",
        "3h10m",
    ]
    assert [ago(value) for value in (-1, 12, 2_820, 11_400, 500_000)] == [
        "0 s ago",
        "12 s ago",
        "47 min ago",
        "3 h ago",
        "6 days ago",
    ]


def test_tokens_become_text() -> None:
    assert list(Vocabulary(TOKENIZER).texts([0, 26, 27, 28, 999])) == ["a", " ", "\n", "<|im_end|>", "<999>"]
    level = {"model": {"vocab": {"\u00c3": 0, "\u00b6": 1, "\u00b6x": 2}}, "decoder": {"type": "ByteLevel"}}
    assert list(Vocabulary(level).texts([0, 1])) == ["", "\u00f6"], "a character of two tokens stands at the second"
    pieces_of = {"model": {"vocab": [["\u2581a", 0.0], ["<0x0A>", 0.0]]}}
    assert list(Vocabulary(pieces_of).texts([0, 1])) == [" a", "\n"]
