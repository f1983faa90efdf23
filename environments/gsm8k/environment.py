"""Environment with one question and one answer message that ends with a number, scored by `MathReward`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pydantic import Field, field_validator

import forge_env as fe
from environments.gsm8k.problems import LARGEST, Levels, make_problem, slipped
from forge_env.environment.single_turn import SingleTurnConfig
from forge_env.errors import UsageError
from forge_env.rewards.math import marked_answer
from forge_env.tasks.datasets import DatasetConfig, StreamedTasks, load_tasks
from forge_env.types import Message, Task

HUB = "openai/gsm8k"
HUB_DEFAULTS = {"path": HUB, "name": "main", "splits": {"train": "train", "eval": "test"}}
COLUMNS = {"prompt": "question", "gold": "answer", "answer": "answer"}
ATTEMPTS = 200
"""Maximum number of problems drawn until one belongs to the split."""


class GSM8KConfig(SingleTurnConfig):
    """Source of the problems and partial rewards."""

    dataset: DatasetConfig | None = None
    """Dataset: openai/gsm8k, or a file with the columns question and answer. None: problems generated offline."""
    levels: Levels = Field(default_factory=lambda: [1, 2, 3], min_length=1)
    """Numbers of steps per generated problem, 1 to 6, drawn uniformly."""
    partial_credit: float = Field(0.1, ge=0.0, lt=1.0)
    """Reward for the right number if it is not marked as the answer."""
    largest: int = Field(LARGEST, ge=20)
    """Upper bound of all intermediate counts of generated problems. Use small values for small models."""
    demo_slip: float = Field(0.0, ge=0.0, le=1.0)
    """Probability that a demonstration of a generated training task miscalculates its last step."""

    @field_validator("dataset", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Accept a name or path alone, for a dataset with gsm8k's columns."""
        if value == "generated":
            return None
        given: dict[str, Any] = {"path": value} if isinstance(value, str) else value
        if not isinstance(given, dict):
            return value
        defaults = HUB_DEFAULTS if given.get("path") == HUB else {}
        if defaults and given.get("split") in ("train", None):  # the hub split `test` is held out then
            given = {name: item for name, item in given.items() if name != "split"}
        elif "split" in given:
            defaults = {name: item for name, item in defaults.items() if name != "splits"}
        return {"columns": COLUMNS, **defaults, **given}


class GSM8K(fe.SingleTurnEnvironment):
    """Grade school word problems, answered with one number after `####`."""

    api_version = 1
    config_class = GSM8KConfig
    system_prompt = "Solve the problem step by step. End with the answer, a number alone, on a line of its own: #### 42"
    config: GSM8KConfig

    def __init__(self, config: GSM8KConfig | None = None, **context: Any) -> None:
        reward = fe.rewards.MathReward(partial_credit=(config or GSM8KConfig()).partial_credit)
        self.rubric = fe.Rubric([reward], metrics=[answered])
        super().__init__(config, **context)

    def task(self, split: str, index: int) -> Task:
        """Return row `index` of the dataset, or the problem generated for `(seed, split, index)`."""
        if self.config.dataset is not None:
            return load_tasks(self.config.dataset, split)[index]
        return generated_task(self.config.seed, split, index, self.config.levels, self.config.largest)

    def num_tasks(self, split: str) -> int | None:
        """Number of dataset rows; None if problems are generated or streamed."""
        if self.config.dataset is None:
            return None
        tasks = load_tasks(self.config.dataset, split)
        return None if isinstance(tasks, StreamedTasks) else len(tasks)

    def demonstrate(self, task: Task, rng: Random) -> list[Message] | None:
        """The question and its solution; in generated training tasks miscalculated with probability `demo_slip`."""
        if task.gold is None:
            return None
        slips = task.split == self.splits[0] and self.config.dataset is None and rng.random() < self.config.demo_slip
        solution = slipped(task.gold, rng) if slips else task.gold
        return [*self.prompt(task), Message(role="assistant", content=solution)]


def answered(response: str) -> float:
    """1 if the response marks an answer; otherwise 0."""
    return float(marked_answer(response) is not None)


def generated_task(seed: int, split: str, index: int, levels: Sequence[int], largest: int = LARGEST) -> Task:
    """The `index`-th generated problem of `split`; one problem in ten belongs to `eval`, independent of the seed."""
    rng = Random(f"gsm8k/{seed}/{split}/{index}")
    for _ in range(ATTEMPTS):
        problem = make_problem(rng, rng.choice(levels), largest)
        if problem.held_out == (split == "eval"):
            return Task(
                id=f"{split}-{seed}-{index}",
                prompt=problem.question,
                data={"answer": str(problem.answer)},
                gold=problem.solution,
                difficulty=problem.level,
                tags=[problem.story],
                split=split,
            )
    raise UsageError(f"no problem of levels {list(levels)} belongs to split {split!r}", fix="choose more levels")
