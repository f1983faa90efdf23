"""Actors that serve rewards and tasks, for a custom training loop.

    dataset = await DatasetActor.as_actor("rows.jsonl", columns={"prompt": "question", "gold": "answer"})
    rewards = await RewardActor.options(num_replicas=2).as_service([MathReward(), ThinkingReward()])
    task = await dataset.sample.call_one()
    reward = await rewards.evaluate_response.route(task.prompt, response, task.gold)

Runs of a recipe use neither: their rollout workers read the tasks and apply their environment's rubric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forge_env.rewards.rubric import Rubric
from forge_env.tasks.datasets import DatasetConfig, StreamedTasks, load_tasks
from forge_env.tasks.order import TaskOrder
from forge_env.types import Task
from trainers.actors.actor import ForgeActor, concurrent_endpoint, endpoint

SPLIT = "train"


class RewardActor(ForgeActor):
    """Scores responses with reward functions.

    Args:
        reward_functions: callables `(prompt, response, target) -> float`, sync or async (`forge_env.rewards` has some;
            `Ensemble` combines many weak ones into one). A function may take fewer of these parameters.
        weights: one per function; None: the reward is the mean of the functions.
    """

    repeatable = frozenset({"evaluate_response"})

    def __init__(self, reward_functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        count = len(reward_functions)
        self._rubric = Rubric(reward_functions, [1.0 / count] * count if weights is None else weights)

    @concurrent_endpoint
    async def evaluate_response(self, prompt: str, response: str, target: Any = None) -> float:
        """Score a response.

        Raises:
            EnvironmentBugError: a reward function raised, or returned something other than a finite number.
        """
        task = Task(id="response", prompt=prompt, data={"answer": target})
        return (await self._rubric.score(task=task, answer=response)).reward


class DatasetActor(ForgeActor):
    """Serves the tasks of a dataset one by one, epoch after epoch.

    Args:
        path: a .jsonl, .json or .parquet file, a folder, or a dataset on the hub.
        split: split to read; None: all files, or `train`.
        streaming: read a hub dataset while tasks are requested; tasks then come in the dataset's order.
        shuffle: False: tasks come in the order of the rows.
        options: other fields of `DatasetConfig`: `columns`, `name`, `limit`, ...
    """

    def __init__(
        self,
        path: str,
        *,
        split: str | None = None,
        streaming: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        **options: Any,
    ) -> None:
        given = {"path": path, "split": split, "streaming": streaming, "eval_fraction": 0.0, **options}
        self._config = DatasetConfig.model_validate(given)
        self._seed, self._shuffle = seed, shuffle
        self._position = 0

    @endpoint
    async def setup(self) -> None:
        """Load the dataset; with `streaming`, open it."""
        self._tasks = load_tasks(self._config, SPLIT)
        count = None if isinstance(self._tasks, StreamedTasks) else len(self._tasks)
        self._order = TaskOrder(count, seed=self._seed, shuffle=self._shuffle)

    @endpoint
    async def sample(self) -> Task:
        """Return the next task.

        Raises:
            UsageError: a row can't be read as a task; the message names the row.
        """
        task = self._tasks[self._order[self._position]]
        self._position += 1
        return task
