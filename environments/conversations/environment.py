"""The environment: rows with a whole conversation, or with a question and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import ClassVar

import forge_env as fe
from forge_env.environment.base import EnvironmentConfig
from forge_env.environment.single_turn import SingleTurnConfig
from forge_env.errors import UsageError
from forge_env.tasks.datasets import DatasetConfig, StreamedTasks, load_tasks, read_messages
from forge_env.types import Message, Observation, Task


class ConversationsConfig(SingleTurnConfig):
    """Which dataset, and what is added to its rows."""

    dataset: DatasetConfig
    """Rows with a column `messages` (OpenAI's chat format, or ShareGPT's), or with columns that are mapped to `prompt`
    and `gold`: a question and its answer."""
    context: str | None = None
    """Column whose text, where there is any, follows the question (Alpaca's `input`)."""
    system: str | None = None
    """System message of conversations that have none."""


class Conversations(fe.SingleTurnEnvironment):
    """The messages before a conversation's last answer; the reward is how similar the agent's own answer is to it."""

    api_version = 1
    config_class: ClassVar[type[EnvironmentConfig]] = ConversationsConfig
    rubric = fe.Rubric([fe.rewards.fuzzy_match])
    config: ConversationsConfig

    def tasks(self, split: str) -> Sequence[Task] | StreamedTasks:
        """Rows of the dataset."""
        return load_tasks(self.config.dataset, split)

    def task(self, split: str, index: int) -> Task:
        """Row `index`; its `gold` is the last answer."""
        task = self.tasks(split)[index]
        return task.model_copy(update={"gold": self._conversation(task)[-1].content})

    def num_tasks(self, split: str) -> int | None:
        """Rows of the dataset; None where it is streamed."""
        tasks = self.tasks(split)
        return None if isinstance(tasks, StreamedTasks) else len(tasks)

    def prompt(self, task: Task) -> Observation:
        """What comes before the last answer."""
        return self._conversation(task)[:-1]

    def demonstrate(self, task: Task, rng: Random) -> list[Message]:
        """The whole conversation."""
        return self._conversation(task)

    def _conversation(self, task: Task) -> list[Message]:
        """Up to the last answer, all of it.

        Raises:
            UsageError: the row holds none.
        """
        rows = task.data.get("messages")
        messages = read_messages(rows, task.id) if isinstance(rows, list) else self._question(task)
        while messages and messages[-1].role != "assistant":
            messages.pop()
        if not messages:
            raise UsageError(
                f"{self.config.dataset.path}, {task.id}: there is no answer to learn",
                fix="map the columns: columns: {prompt: COLUMN, gold: COLUMN}, or {messages: COLUMN}",
            )
        if self.config.system is not None and messages[0].role != "system":
            messages.insert(0, Message(role="system", content=self.config.system))
        return messages

    def _question(self, task: Task) -> list[Message]:
        context = task.data.get(self.config.context) if self.config.context is not None else None
        question = f"{task.prompt}\n\n{context}" if context else task.prompt
        answer = [] if task.gold is None else [Message(role="assistant", content=task.gold)]
        return [*task.history, Message(role="user", content=question), *answer]
