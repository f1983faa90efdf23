"""Generated problems of the package `reasoning_gym`; each dataset is a single-turn environment.

    env = fe.make("reasoning_gym", dataset="basic_arithmetic", options={"max_terms": 3})

The datasets' scorers score the answers; some give partial rewards.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from pydantic import Field

import forge_env as fe
from forge_env.environment.base import EnvironmentConfig
from forge_env.environment.single_turn import SingleTurnConfig
from forge_env.errors import UsageError, suggestion
from forge_env.rewards.spans import last_between
from forge_env.types import Task

SIZE = 10_000
"""Number of tasks per split."""


class ReasoningGymConfig(SingleTurnConfig):
    """Name and options of the dataset."""

    dataset: str
    """Name of the dataset, such as basic_arithmetic."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the dataset: sizes, ranges, levels."""


class ReasoningGym(fe.SingleTurnEnvironment):
    """Generated reasoning problems with answers that can be checked."""

    api_version = 1
    config_class = ReasoningGymConfig
    system_prompt = (
        "Think about the problem step by step. Then write the answer, and nothing else, between <answer> and </answer>."
    )
    config: ReasoningGymConfig

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self._problems(self.splits[0])  # raise errors about the name and the options at construction

    def task(self, split: str, index: int) -> Task:
        """Return problem `index` of the dataset."""
        problem = self._problems(split)[index]
        answer = problem["answer"]
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=problem["question"],
            data={"index": index},
            gold=None if answer is None else f"<answer>{answer}</answer>",
            tags=[self.config.dataset],
            split=split,
        )

    def num_tasks(self, split: str) -> int | None:
        """`SIZE` for every split."""
        return SIZE

    def reward(self, task: Task, completion: str) -> float:
        """Score of the text between the answer tags, by the dataset's scorer; 0 without tags."""
        given = last_between(completion, "<answer>", "</answer>")
        if given is None:
            return 0.0
        problems = self._problems(task.split)
        entry = problems[task.data["index"]]
        try:
            return float(problems.score_answer(given.strip("\n"), entry=entry))
        except Exception as error:  # noqa: BLE001 - several scorers raise on an answer that they can't parse
            fe.rewards.explain("unreadable answer", [f"{type(error).__name__}: {error}"])
            return 0.0

    def _problems(self, split: str) -> Any:
        block = 2 * self.config.seed + self.splits.index(split)  # problem i of seed s is problem 0 of seed s + i
        return open_dataset(self.config.dataset, json.dumps(self.config.options, sort_keys=True), block * SIZE % 2**31)


@lru_cache(maxsize=32)
def open_dataset(name: str, options_json: str, seed: int) -> Any:
    """Open a dataset, cached per process. `UsageError`: the package is missing, or has no such dataset or option."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        fix = 'pip install "forge-env[reasoning_gym]"'
        raise UsageError("the package reasoning_gym is not installed", fix=fix) from error
    if name not in DATASETS:
        every = f"it has {len(DATASETS)}, such as {', '.join(sorted(DATASETS)[:5])}"
        raise UsageError(f"reasoning_gym has no dataset {name!r}", fix=suggestion(name, DATASETS, every))
    try:
        return reasoning_gym.create_dataset(name, **{**json.loads(options_json), "seed": seed, "size": SIZE})
    except (AssertionError, TypeError, ValueError) as error:
        known = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        problem = f"reasoning_gym can't make {name!r}: {str(error) or type(error).__name__}"
        raise UsageError(problem, fix=f"options of {name}: {', '.join(known)}") from error
