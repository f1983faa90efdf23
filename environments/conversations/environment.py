"""Environment over dataset rows that hold a whole conversation or a question with its answer."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import forge_env as fe
from forge_env.environment.single_turn import SingleTurnConfig
from forge_env.errors import UsageError
from forge_env.tasks.datasets import DatasetConfig, StreamedTasks, load_tasks, read_messages
from forge_env.types import Message, Observation, Task


class ConversationsConfig(SingleTurnConfig):
    """The dataset and the additions to its rows."""

    dataset: DatasetConfig
    """Dataset with a column `messages` (in OpenAI's or ShareGPT's chat format), or with columns mapped to `prompt` and
    `gold`: a question and its answer."""
    context: str | None = None
    """Column whose text, if not empty, is appended to the question (Alpaca's `input`)."""
    system: str | None = None
    """System message added to conversations that have none."""


class Conversations(fe.SingleTurnEnvironment):
    """The messages before a conversation's last answer; the reward is how similar the agent's answer is to it."""

    api_version = 1
    config_class = ConversationsConfig
    rubric = fe.Rubric([fe.rewards.fuzzy_match])
    config: ConversationsConfig

    def tasks(self, split: str) -> Sequence[Task] | StreamedTasks:
        """Load the dataset of a split."""
        return load_tasks(self.config.dataset, split)

    def task(self, split: str, index: int) -> Task:
        """Return row `index`, with the last answer as `gold`; in a row of messages, the one before it is the prompt."""
        task = self.tasks(split)[index]
        *before, answer = self._conversation(task)
        changes: dict[str, object] = {"gold": answer.content}
        if isinstance(task.data.get("messages"), list) and before and before[-1].role == "user":
            changes |= {"prompt": before[-1].content, "history": before[:-1]}
        return task.model_copy(update=changes)

    def num_tasks(self, split: str) -> int | None:
        """Number of dataset rows; None if the dataset is streamed."""
        tasks = self.tasks(split)
        return None if isinstance(tasks, StreamedTasks) else len(tasks)

    def prompt(self, task: Task) -> Observation:
        """The messages before the last answer."""
        return self._conversation(task)[:-1]

    def demonstrate(self, task: Task, rng: Random) -> list[Message]:
        """The whole conversation."""
        return self._conversation(task)

    def _conversation(self, task: Task) -> list[Message]:
        """The conversation up to and including its last answer. `UsageError`: the row has no answer."""
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
