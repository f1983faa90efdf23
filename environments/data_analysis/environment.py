"""Environment with a database in a sandbox, an SQL tool, a Python tool and a question to answer."""

from __future__ import annotations

import hashlib
from random import Random

from pydantic import Field, field_validator

import forge_env as fe
from environments.answers import answered, final_answer
from environments.data_analysis.questions import KINDS
from environments.data_analysis.shop import SCHEMA, draw_shop
from forge_env.errors import UsageError
from forge_env.rewards.math import parse_number
from forge_env.types import Action, Task

ATTEMPTS = 200
DATABASE = "shop.db"
MOST_ROWS = 40
# Runs one statement of the agent inside the sandbox; the query is read from stdin.
_RUN_SQL = f"""
import sqlite3, sys
try:
    connection = sqlite3.connect("file:{DATABASE}?mode=ro", uri=True)
    cursor = connection.execute(sys.stdin.read())
    rows = cursor.fetchmany({MOST_ROWS} + 1)
except sqlite3.Error as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
if cursor.description is None:
    sys.exit("the statement returned no rows")
print(" | ".join(column[0] for column in cursor.description))
for row in rows[:{MOST_ROWS}]:
    print(" | ".join("NULL" if value is None else str(value) for value in row))
if len(rows) > {MOST_ROWS}:
    print("[only the first {MOST_ROWS} rows are shown]")
"""


class DataAnalysisConfig(fe.SandboxEnvironmentConfig):
    """Question selection, answer tolerance and sandbox limits."""

    kinds: list[str] = Field(default_factory=list)
    """Kinds of questions to draw; empty: all kinds."""
    tolerance: float = Field(0.005, ge=0.0)
    """Largest accepted difference between a numeric answer and the right one."""

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: list[str]) -> list[str]:
        if wrong := [name for name in kinds if name not in KINDS]:
            raise ValueError(f"{wrong[0]!r} is not a valid kind; use some of {', '.join(KINDS)}")
        return kinds


def correct(env: DataAnalysis, task: Task, completion: str) -> float:
    """1 if the answer is the right name, or a number within `tolerance` of the right one; otherwise 0."""
    given, wanted = final_answer(completion), str(task.data["answer"])
    if given is None:
        return 0.0
    number = parse_number(wanted)
    if number is None:
        return float(given.casefold() == wanted.casefold())
    value = parse_number(given)
    return float(value is not None and abs(value - number) <= env.config.tolerance + 1e-9)


class DataAnalysis(fe.SandboxEnvironment):
    """Questions about a shop's database, answered with SQL and Python in a sandbox."""

    api_version = 1
    config_class = DataAnalysisConfig
    system_prompt = (
        f"Answer the question about the SQLite database {DATABASE}. Look things up with the tools sql and python, then "
        f"answer with <answer>...</answer>, a number or a name alone. Days are text such as 2024-05-01.\n\n{SCHEMA}"
    )
    config: DataAnalysisConfig
    rubric = fe.Rubric([correct], metrics=[answered])
    python = fe.tools.python()

    def task(self, split: str, index: int) -> Task:
        """The `index`-th question of `split`, with a separately drawn shop; one shop in five belongs to `eval`."""
        rng = Random(f"data_analysis/{self.config.seed}/{split}/{index}")
        names = self.config.kinds or list(KINDS)
        for _ in range(ATTEMPTS):
            shop_seed = str(rng.randrange(1_000_000))
            if is_held_out(shop_seed) != (split == "eval"):
                continue
            name = rng.choice(names)
            question = KINDS[name](rng, draw_shop(shop_seed))
            if question is not None:
                return Task(
                    id=f"{split}-{self.config.seed}-{index}",
                    prompt=question.text,
                    data={"public_shop": shop_seed, "answer": question.answer, "query": question.query},
                    gold=f"<answer>{question.answer}</answer>",
                    difficulty=question.difficulty,
                    tags=[name],
                    split=split,
                )
        raise UsageError(f"no question of {', '.join(names)} could be drawn", fix="choose more kinds")

    def gold_actions(self, task: Task) -> list[Action] | None:
        """One `sql` call with the question's query, then the answer."""
        return None if task.gold is None else [fe.call_tool("sql", query=task.data["query"]), task.gold]

    def files(self, task: Task) -> dict[str, str | bytes]:
        """The shop's SQLite database file."""
        return {DATABASE: draw_shop(task.data["public_shop"]).database()}

    @fe.tool
    async def sql(self, query: str) -> str:
        """Run one SQL query on the database and return its rows.

        Args:
            query: one SELECT statement of SQLite.
        """
        return await self.run_python(_RUN_SQL, stdin=query)


def is_held_out(shop_seed: str) -> bool:
    """Whether a shop belongs to the split `eval`."""
    return hashlib.sha256(shop_seed.encode()).digest()[0] < 51  # 51 of 256: one in five
