"""Answers are right by two ways; the database can only be read, and no query gets out of hand."""

from __future__ import annotations

from random import Random

import pytest

import forge_env as fe
from environments.sql.environment import SQL, SQLConfig, correct
from environments.sql.guard import MOST_ROWS, guarded, rows_as_text
from environments.sql.questions import KINDS, Kind
from environments.sql.world import draw_world
from forge_env.errors import ToolError

HUGE = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.mark.parametrize("kind", [kind for kinds in KINDS.values() for kind in kinds], ids=lambda kind: kind.__name__)
def test_python_and_sql_agree_on_the_answer(kind: Kind) -> None:
    asked = 0
    for seed in range(16):
        world = draw_world(str(seed))
        if (question := kind(Random(seed), world)) is None:
            continue
        asked += 1
        database = guarded(world.script())
        assert rows_as_text(database, question.query).splitlines()[1:] == [question.answer], question
        database.close()
    assert asked > 4


@pytest.mark.parametrize(
    "sql",
    [
        *("DELETE FROM sqlite_master", "CREATE TABLE t (i)", "ATTACH '/tmp/x.db' AS x", "PRAGMA writable_schema = 1"),
        *("SELECT load_extension('x')", "SELECT zeroblob(1000000000)", "SELECT random()", "VACUUM INTO '/tmp/x'"),
        *(
            "SELECT 1; SELECT 2",
            "",
            "nonsense",
            "SELECT 1\0",
            "SELECT '\ud800'",
            "BEGIN",
            "SELECT " + "1," * 5000 + "1",
        ),
        f"{HUGE} SELECT COUNT(*) FROM n",
        f"{HUGE} SELECT i FROM n ORDER BY i",
    ],
)
def test_what_is_refused(sql: str) -> None:
    database = guarded(draw_world("1").script())
    before = database.total_changes
    with pytest.raises(ToolError):
        rows_as_text(database, sql)
    assert database.total_changes == before
    assert rows_as_text(database, "SELECT 1") == "1\n1"  # and it still answers
    database.close()


def test_what_is_shown() -> None:
    world = draw_world("2")
    database = guarded(world.script())
    shown = rows_as_text(database, f"SELECT * FROM {world.theme.events}")
    assert len(shown.splitlines()) == MOST_ROWS + 2
    assert "NULL" in shown
    assert "only the first 40 rows" in shown
    assert world.theme.people in rows_as_text(database, "SELECT sql FROM sqlite_master")
    assert "town" in rows_as_text(database, f"PRAGMA table_info({world.theme.people})")
    assert rows_as_text(database, "SELECT CAST(x'ff' AS TEXT) AS t") == "t\n\ufffd"
    database.close()


def test_levels() -> None:
    env = SQL(SQLConfig(levels=[3]))
    assert {env.task("train", index).difficulty for index in range(10)} == {3}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("<answer> 12.0 </answer>", 1.0), ("<answer>12.4</answer>", 0.0), ("12", 0.0), ("<answer>x</answer>", 0.0)],
)
def test_answers_are_exact(answer: str, reward: float) -> None:
    assert correct(fe.Task(id="t", prompt="", data={"answer": "12"}), answer) == reward
