"""Uniqueness of task ids, by which results are counted."""

from __future__ import annotations

from collections.abc import Iterable

from forge_env.errors import UsageError
from forge_env.visible import shown

SHOWN = 5
"""Maximum ids named in an error."""


def check_unique(ids: Iterable[tuple[str, int]], source: str, unit: str, fix: str) -> None:
    """Raise an error if several tasks have the same id.

    Args:
        ids: each id with the number of its task.
        unit: name of the numbered unit, "row" or "task".

    Raises:
        UsageError: ids are repeated; it names them and the numbers of their tasks.
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
