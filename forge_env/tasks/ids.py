"""Ids of tasks are unique: results are counted by them."""

from __future__ import annotations

from collections.abc import Iterable

from forge_env.errors import UsageError
from forge_env.visible import shown

SHOWN = 5
"""Ids that are named."""


def check_unique(ids: Iterable[tuple[str, int]], source: str, unit: str, fix: str) -> None:
    """Refuse ids that several tasks have.

    Args:
        ids: each with the number of its task.
        source: of the tasks, for the error.
        unit: that is numbered, "row" or "task".
        fix: what to do.

    Raises:
        UsageError: it names the ids, and the numbers of their tasks.
    """
    first: dict[str, int] = {}
    repeated: dict[str, list[int]] = {}
    for task_id, number in ids:
        if first.setdefault(task_id, number) != number:
            repeated.setdefault(task_id, [first[task_id]]).append(number)
    if not repeated:
        return
    named = [
        f"{shown(task_id)} ({unit}s {', '.join(map(str, numbers[:SHOWN]))}{', ...' * (len(numbers) > SHOWN)})"
        for task_id, numbers in list(repeated.items())[:SHOWN]
    ]
    more = f" and {len(repeated) - SHOWN} more" if len(repeated) > SHOWN else ""
    raise UsageError(f"{source}: several {unit}s have one id: {', '.join(named)}{more}", fix=fix)
