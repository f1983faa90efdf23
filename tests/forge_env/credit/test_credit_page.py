"""The page and the lines of an episode's credits."""

from __future__ import annotations

import re

import pytest

import forge_env as fe
from forge_env.cli.credit import lines
from forge_env.credit.results import Call, Credits, Value, difference
from forge_env.evaluation.estimates import Estimate
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from forge_env.view.credit import credit_page

HOSTILE = "<script>alert(1)</script>\x1b[2J"
LOW, HIGH = Estimate(0.2, 0.1, 0.1, 0.4), Estimate(0.9, 0.1, 0.7, 1.0)


def made() -> tuple[Credits, Trajectory]:
    say = Message(role="assistant", content=HOSTILE)
    call = fe.call_tool("edit", path=HOSTILE)
    two = Message(role="assistant", tool_calls=[*call.tool_calls, *fe.call_tool("search").tool_calls])
    turns = [Turn([Message(role="user", content=HOSTILE)], Reply(message)) for message in (say, two)]
    calls = [
        Call(1, "", HOSTILE, LOW, LOW, 0.0),
        Call(2, "edit", HOSTILE, LOW, HIGH, 0.25),
        Call(2, "search", "{}", HIGH, None, 1.0),
    ]
    episode = Trajectory("e", "env", "t", turns=turns)
    return Credits("run", "e", "env", HOSTILE, "m", 1.0, 16, calls, differs=2, difference=HOSTILE), episode


def test_the_page_has_a_bar_beside_each_call_and_escapes_texts() -> None:
    text = credit_page(*made())
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert text.count('<svg viewBox="0 0 210') == 2
    assert [text.count(f'<rect class="{colour}"') for colour in ("good", "bad", "soft")] == [1, 0, 1]
    assert "+0.70 (+0.42 to +0.84)" in text
    assert "unknown" in text
    assert "25% of the continuations made it again" in text
    assert "its answer to turn 2 differs" in text
    edit, search = text.index("<b>edit</b>"), text.index("<b>search</b>")
    assert edit < text.index("+0.70 (", edit) < search


def test_bars_are_as_long_as_the_credits() -> None:
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', credit_page(*made()))]
    assert widths == [1.0, pytest.approx(0.7 / difference(HIGH, LOW).high * 101, abs=0.1)]


def test_terminals_get_no_control_characters() -> None:
    assert "\x1b" not in "\n".join(lines(made()[0]))


def test_intervals_are_not_empty_if_all_rewards_are_equal() -> None:
    none, every = (Value([reward] * 16).estimate(0.0, 1.0) for reward in (0.0, 1.0))
    assert none is not None
    assert every is not None
    credit = difference(every, none)
    assert credit.value == 1.0
    assert 0.6 < credit.low < 0.8
    assert credit.high == 1.0
    assert difference(none, none).low < 0 < difference(none, none).high


def test_rewards_of_another_range_are_scaled() -> None:
    estimate = Value([-1.0, 3.0, 3.0, 3.0]).estimate(-1.0, 3.0)
    assert estimate.value == 2.0
    assert -1.0 < estimate.low < 2.0 < estimate.high < 3.0
    assert Value().estimate(0.0, 1.0) is None
