"""Whether an agent was shown what its task hides: the gold solution, or what it is scored against."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from forge_env.trajectory import Trajectory
from forge_env.types import Task

SHORTEST_TEXT = 12
"""Hidden texts shorter than this occur by chance and aren't looked for, characters."""
SHORTEST_NUMBER = 6
"""An answer that is a number of so many digits doesn't occur in a prompt by chance."""


def hidden_texts(task: Task) -> list[tuple[str, str]]:
    """`(where, text)` of the hidden texts that are long enough to be recognised; `data["public..."]` may be shown."""
    return [(where, text) for where, text in _hidden(task) if len(text) >= SHORTEST_TEXT]


def is_looked_for(task: Task) -> bool:
    """Whether the task hides anything that `shown_hidden` could recognise."""
    return bool(hidden_texts(task)) or any(True for _ in _numbers(task))


def shown_hidden(played: Sequence[Trajectory], tasks: Sequence[Task]) -> str | None:
    """Which hidden text an agent was shown that had not said it itself, or None.

    A number that is the answer is looked for in the first messages only: later ones may lead to it.
    """
    by_id = {task.id: task for task in tasks}
    for trajectory in played:
        task = by_id[trajectory.task_id]
        first = trajectory.turns[0].observation if trajectory.turns else trajectory.final_observation
        seen = [message for turn in trajectory.turns for message in turn.observation] + trajectory.final_observation
        shown = [where for where, text in hidden_texts(task) if any(text in message.content for message in seen)]
        shown += [
            where for where, number in _numbers(task) if any(_holds(message.content, number) for message in first)
        ]
        if shown:
            return f"task {task.id!r} shows the agent its {shown[0]}"
    return None


def _hidden(task: Task) -> Iterator[tuple[str, str]]:
    if task.gold is not None:
        yield "gold solution", task.gold
    for key, value in task.data.items():
        if not key.startswith("public"):
            for text in _texts(value):
                yield f"data[{key!r}]", text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _numbers(task: Task) -> Iterator[tuple[str, str]]:
    for where, value in (("gold solution", task.gold), ("data['answer']", task.data.get("answer"))):
        text = "" if value is None else str(value).strip()
        if re.fullmatch(r"-?[\d.]+", text) and sum(map(str.isdigit, text)) >= SHORTEST_NUMBER:
            yield where, text


def _holds(text: str, number: str) -> bool:
    return re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text) is not None
