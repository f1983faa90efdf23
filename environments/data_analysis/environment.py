"""The environment: a database in a sandbox, a tool for SQL and one for Python, and a question to answer."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import AsyncExitStack
from random import Random
from typing import ClassVar

from pydantic import Field, field_validator

import forge_env as fe
from environments.data_analysis.questions import KINDS
from environments.data_analysis.shop import SCHEMA, draw_shop
from forge_env.environment import EnvironmentConfig
from forge_env.errors import UsageError
from forge_env.rewards.math import parse_number
from forge_env.sandbox import ExecResult, Limits, Sandbox
from forge_env.tool_environment import ToolEnvironmentConfig
from forge_env.types import Action, FunctionCall, Message, Task, ToolCall

ATTEMPTS = 200
DATABASE = "shop.db"
MOST_ROWS = 40
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Runs one statement that the agent wrote, inside the sandbox; the query comes in over stdin.
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


class DataAnalysisConfig(ToolEnvironmentConfig):
    """Which questions, and what a piece of code may take."""

    kinds: list[str] = Field(default_factory=list)
    """Only these kinds of questions; empty: all."""
    tolerance: float = Field(0.005, ge=0.0)
    """Largest difference of an answer that is a number."""
    wall_s: float = Field(10.0, gt=0)
    """Wall seconds of one query or program."""
    cpu_s: float = Field(5.0, gt=0)
    """CPU seconds of one query or program."""
    memory_mb: int = Field(256, ge=32)
    """Memory of one query or program, MiB."""

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: list[str]) -> list[str]:
        if wrong := [name for name in kinds if name not in KINDS]:
            raise ValueError(f"there is no kind {wrong[0]!r}; there are {', '.join(KINDS)}")
        return kinds


class DataAnalysis(fe.ToolEnvironment):
    """Questions about a shop's database, answered with SQL and Python in a sandbox."""

    config_class: ClassVar[type[EnvironmentConfig]] = DataAnalysisConfig
    system_prompt: ClassVar[str | None] = (
        f"Answer the question about the SQLite database {DATABASE}. Look things up with the tools sql and python, then "
        f"answer with <answer>...</answer>, a number or a name alone. Days are text such as 2024-05-01.\n\n{SCHEMA}"
    )
    config: DataAnalysisConfig

    def __init__(self, config: DataAnalysisConfig | None = None, **context: object) -> None:
        self.rubric = fe.Rubric([correct], metrics=[answered])
        self.box: Sandbox | None = None
        self._holding = AsyncExitStack()
        super().__init__(config, **context)

    def task(self, split: str, index: int) -> Task:
        """The `index`-th question of `split`, about a shop of its own; one shop in five belongs to `eval`."""
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
        """The query through the tool, then the answer."""
        if task.gold is None:
            return None
        call = FunctionCall(name="sql", arguments=json.dumps({"query": task.data["query"]}))
        return [Message(role="assistant", tool_calls=[ToolCall(id="gold", function=call)]), task.gold]

    async def setup(self, task: Task) -> None:
        """A clean sandbox that holds the database."""
        if self.sandboxes is None:
            raise UsageError("data_analysis runs code and was given no sandboxes", fix="pass an engine: open_engine()")
        self.box = await self._holding.enter_async_context(self.sandboxes.session())
        await self.box.write_file(DATABASE, draw_shop(task.data["public_shop"]).database())

    async def cleanup(self) -> None:
        """Give the sandbox back."""
        self.box = None
        await self._holding.aclose()

    @fe.tool
    async def sql(self, query: str) -> str:
        """Run one SQL query on the database and return its rows.

        Args:
            query: one SELECT statement of SQLite.
        """
        return _as_text(await self._sandbox.run_python(_RUN_SQL, stdin=query, limits=self._limits))

    @fe.tool
    async def python(self, code: str) -> str:
        """Run a Python program and return what it printed. The standard library is there, and the database as a file.

        Args:
            code: the program, such as "import sqlite3; db = sqlite3.connect('shop.db')".
        """
        return _as_text(await self._sandbox.run_python(code, limits=self._limits))

    @property
    def _limits(self) -> Limits:
        return Limits(wall_s=self.config.wall_s, cpu_s=self.config.cpu_s, memory_mb=self.config.memory_mb)

    @property
    def _sandbox(self) -> Sandbox:
        if self.box is None:
            raise UsageError("there is no running episode", fix="call reset() first")
        return self.box


def _as_text(result: ExecResult) -> str:
    if result.ok:
        return result.stdout or "[no output]"
    if result.timed_out:
        return f"{result.stdout}\n[stopped: it took too long]".lstrip("\n")
    return f"{result.stdout}\n{result.stderr.strip() or '[it ended early]'}".lstrip("\n")


def is_held_out(shop_seed: str) -> bool:
    """Whether a shop is of the split `eval`."""
    return hashlib.sha256(shop_seed.encode()).digest()[0] < 51  # 51 of 256: one in five


def given_answer(text: str) -> str | None:
    """What the last answer tag holds."""
    found = _TAG.findall(text)
    return str(found[-1]).strip() if found else None


def correct(env: DataAnalysis, task: Task, answer: str) -> float:
    """Whether the answer is the right number, nearly, or the right name."""
    given, wanted = given_answer(answer), str(task.data["answer"])
    if given is None:
        return 0.0
    number = parse_number(wanted)
    if number is None:
        return float(given.casefold() == wanted.casefold())
    value = parse_number(given)
    return float(value is not None and abs(value - number) <= env.config.tolerance + 1e-9)


def answered(answer: str) -> float:
    """Whether there is an answer tag."""
    return float(given_answer(answer) is not None)
