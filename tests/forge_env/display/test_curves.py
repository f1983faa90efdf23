"""Curves of the metrics, and how they are drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.display.curves import (
    COLOUR_OF,
    COLOURS,
    PANELS,
    colour_of,
    curve,
    is_waiting,
    merge_rows,
    reward_curves,
    score_curve,
    time_account,
)
from forge_env.display.svg import line_chart, ticks
from forge_env.figures import number
from forge_env.run.state import held_out_scores


def test_the_last_row_of_a_step_counts() -> None:
    rows = merge_rows([{"step": 2, "a": 1.0}, {"step": 1, "a": 0.0}, {"step": 2, "a": 3.0, "b": 1.0}])
    assert curve(rows, "a", "a").y == [0.0, 3.0]
    assert curve(rows, "b", "b").x == [2.0]


def test_scores_and_splits_come_from_the_rows() -> None:
    rows = [{"step": 0, "eval/eval/score": 0.5, "eval/eval/stderr": 0.1}, {"step": 0, "eval/unseen/score": 0.1}]
    assert list(held_out_scores(rows)) == ["eval", "unseen"]
    assert score_curve(rows, "eval").error == [0.1]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["time/trainer/step", "time/trainer/wait", "time/generator/busy", "reward"]),
            st.floats(min_value=0, max_value=1e6),
        )
    )
)
def test_the_shares_of_an_actor_sum_to_one(rows: list[dict[str, float]]) -> None:
    for account in time_account(rows).values():
        assert sum(account.values()) == pytest.approx(1.0)


@given(st.floats(min_value=-1e9, max_value=1e9), st.floats(min_value=-1e9, max_value=1e9))
def test_ticks_cover_the_range_with_few_marks(first: float, second: float) -> None:
    low, high = min(first, second), max(first, second)
    marks = ticks(low, high)
    span = marks[-1] - marks[0]
    assert marks[0] <= low + 1e-6 * span
    assert marks[-1] >= high - 1e-6 * span
    assert 2 <= len(marks) <= 12


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(min_value=-1e6, max_value=1e6)), min_size=1, max_size=50))
def test_any_curve_can_be_drawn(points: list[tuple[int, float]]) -> None:
    rows = merge_rows([{"step": step, "y": y} for step, y in points])
    text = line_chart([curve(rows, "<y>", "y")], width=460, height=190, label='a "label"')
    assert text.startswith("<svg")
    assert "nan" not in text
    assert "<y>" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (1234, "1,234"), (34_000, "34k"), (1.234e6, "1.23M"), (1e-6, "1e-06")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    "doing",
    [
        ["train", "evaluate", "push weights", "save", "start", "book-keeping"],  # trainers, of every algorithm
        ["generate", "load weights"],
        ["score", "load weights"],
        ["add", "sample", "release", "save"],
        ["reset", "environment", "close"],
        ["python", "command", "tests", "files", "session"],
    ],
)
def test_no_two_things_that_one_actor_does_have_one_colour(doing: list[str]) -> None:
    assert len({colour_of(name) for name in doing}) == len(doing)


def test_whatever_an_actor_does_has_a_colour_of_its_own() -> None:
    root = Path(__file__).parents[3]
    sources = [*root.glob("trainers/**/*.py"), root / "forge_env" / "rollout" / "episode.py"]
    code = "".join(path.read_text() for path in sources)
    done = set(re.findall(r"""(?:\.enter|\.during|watch)\("([\w -]+)"\)""", code))
    assert len(done) > 12
    assert {name for name in done if not is_waiting("episodes", name)} <= COLOUR_OF.keys()
    assert set(COLOUR_OF.values()) == set(range(COLOURS))


@pytest.mark.parametrize(
    ("title", "lines"), [("Staleness of trained tokens", 2), ("Trainer/generator mismatch, mean", 1)]
)
def test_a_panel_draws_what_its_title_says(title: str, lines: int) -> None:
    (panel,) = [panel for panel in PANELS if panel.title == title]
    assert len(panel.series) == lines
    assert panel.unit


def test_a_reward_that_parts_from_the_score_is_drawn_beside_it() -> None:
    """A hacked run's chart was called "Reward" and showed two falling scores."""
    rows = [{"step": step, "reward/mean": 0.5 + 0.04 * step, "reward/solved": 0.5 - 0.04 * step} for step in range(10)]
    rows[0]["eval/eval/score"] = 0.5
    assert [line.label for line in reward_curves(rows, "solved")] == [
        "training solved",
        "held-out solved",
        "training reward",
    ]
    assert len(reward_curves(rows, "solved", apart=False)) == 2, "of several runs, one quantity"
    assert len(reward_curves([{**row, "reward/mean": row["reward/solved"] + 0.01} for row in rows], "solved")) == 2
    assert len(reward_curves([{**row, "reward/mean": 7.0} for row in rows], "solved")) == 2, "on another scale"
