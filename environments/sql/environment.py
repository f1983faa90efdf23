"""The environment: a database in memory, a tool that only reads it, and a question with one exact answer."""

from __future__ import annotations

import sqlite3
from random import Random
from typing import ClassVar, Literal

from pydantic import Field

import forge_env as fe
from environments.seeds import draw_seed
from environments.sql.guard import guarded, rows_as_text
from environments.sql.questions import KINDS
from environments.sql.world import draw_world
from forge_env.environment.base import EnvironmentConfig
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.rewards.math import parse_number
from forge_env.rewards.spans import last_between
from forge_env.types import Action, Task

Level = Literal[1, 2, 3, 4]


class SQLConfig(ToolEnvironmentConfig):
    """Which questions."""

    levels: list[Level] = Field([1, 2, 3, 4], min_length=1)
    """1: one table; 2: two tables; 3: three tables in groups; 4: what is missing, and comparisons with an average."""


class SQL(fe.ToolEnvironment):
    """Questions over a small generated database, answered through a read-only query tool."""

    api_version = 1
    config_class: ClassVar[type[EnvironmentConfig]] = SQLConfig
    system_prompt: ClassVar[str | None] = (
        "Answer the question about an SQLite database with the tool query. The table sqlite_master has the schema in "
        "its column sql. Days are text such as 2024-05-01. End with <answer>...</answer>, a whole number or a name "
        "alone."
    )
    config: SQLConfig

    def __init__(self, config: SQLConfig | None = None, **context: object) -> None:
        self.rubric = fe.Rubric([correct], metrics=[answered])
        self._database: sqlite3.Connection | None = None
        super().__init__(config, **context)

    def task(self, split: str, index: int) -> Task:
        """The `index`-th question of `split`, about a database of its own; one database in five belongs to `eval`."""
        rng = Random(f"sql/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        while True:  # a kind has no question where a name would not be the only right one, which is rare
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
        """The query through the tool, then the answer."""
        return None if task.gold is None else [fe.call_tool("query", sql=task.data["query"]), task.gold]

    async def setup(self, task: Task) -> None:
        """Fill a database in memory, then close it to all but reading."""
        self._database = guarded(draw_world(task.data["public_world"]).script())

    async def cleanup(self) -> None:
        """Forget the database."""
        if self._database is not None:
            self._database.close()
            self._database = None

    @fe.tool(thread=False)  # the connection belongs to this thread, and a query's work is limited
    def query(self, sql: str) -> str:
        """Run one SQL query on the database and return its rows.

        Args:
            sql: one SELECT statement of SQLite.
        """
        assert self._database is not None
        return rows_as_text(self._database, sql)


def given_answer(text: str) -> str | None:
    """What the last answer tag holds."""
    found = last_between(text, "<answer>", "</answer>")
    return None if found is None else found.strip()


def correct(task: Task, answer: str) -> float:
    """Whether the answer is the right whole number, or the right name."""
    given, wanted = given_answer(answer), task.data["answer"]
    if given is None:
        return 0.0
    number = parse_number(wanted)
    return float(given.casefold() == wanted.casefold() if number is None else parse_number(given) == number)


def answered(answer: str) -> float:
    """Whether there is an answer tag."""
    return float(given_answer(answer) is not None)
