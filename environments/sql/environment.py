"""Environment with an in-memory database, a read-only query tool, and a question with one exact answer."""

from __future__ import annotations

import sqlite3
from random import Random
from typing import Literal

from pydantic import Field

import forge_env as fe
from environments.answers import answered, final_answer
from environments.seeds import draw_seed
from environments.sql.guard import guarded, rows_as_text
from environments.sql.questions import KINDS
from environments.sql.world import draw_world
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.rewards.math import parse_number
from forge_env.types import Action, Task

Level = Literal[1, 2, 3, 4]


class SQLConfig(ToolEnvironmentConfig):
    """Question selection."""

    levels: list[Level] = Field([1, 2, 3, 4], min_length=1)
    """1: one table; 2: two tables; 3: three tables with grouping; 4: missing rows and comparisons with an average."""


def correct(task: Task, completion: str) -> float:
    """1 if the answer is the right whole number or name; otherwise 0."""
    given, wanted = final_answer(completion), task.data["answer"]
    if given is None:
        return 0.0
    number = parse_number(wanted)
    return float(given.casefold() == wanted.casefold() if number is None else parse_number(given) == number)


class SQL(fe.ToolEnvironment):
    """Questions over a small generated database, answered through a read-only query tool."""

    api_version = 1
    config_class = SQLConfig
    system_prompt = (
        "Answer the question about an SQLite database with the tool query. The table sqlite_master has the schema in "
        "its column sql. Days are text such as 2024-05-01. End with <answer>...</answer>, a whole number or a name "
        "alone."
    )
    config: SQLConfig
    _database: sqlite3.Connection | None = None
    rubric = fe.Rubric([correct], metrics=[answered])

    def task(self, split: str, index: int) -> Task:
        """The `index`-th question of `split`, with its database; one database in five belongs to `eval`."""
        rng = Random(f"sql/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        while True:  # rarely, a kind has no question: more than one name would be right
            world_seed = draw_seed(rng, split)
            kind = rng.choice(KINDS[level])
            question = kind(rng, draw_world(world_seed))
            if question is not None:
                return Task(
                    id=f"{split}-{self.config.seed}-{index}",
                    prompt=question.text,
                    data={"public_world": world_seed, "answer": question.answer, "query": question.query},
                    gold=f"<answer>{question.answer}</answer>",
                    difficulty=level,
                    tags=[kind.__name__],
                    split=split,
                )

    def gold_actions(self, task: Task) -> list[Action] | None:
        """One `query` call with the question's SQL, then the answer."""
        return None if task.gold is None else [fe.call_tool("query", sql=task.data["query"]), task.gold]

    async def setup(self, task: Task) -> None:
        """Create the in-memory database and make it read-only."""
        self._database = guarded(draw_world(task.data["public_world"]).script())

    async def cleanup(self) -> None:
        """Close the database."""
        if self._database is not None:
            self._database.close()
            self._database = None

    @fe.tool(thread=False)  # the connection is bound to this thread; the work of a query is limited
    def query(self, sql: str) -> str:
        """Run one SQL query on the database and return its rows.

        Args:
            sql: one SELECT statement of SQLite.
        """
        assert self._database is not None
        return rows_as_text(self._database, sql)
