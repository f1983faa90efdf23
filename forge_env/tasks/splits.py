"""Which splits of an environment have tasks."""

from __future__ import annotations

from forge_env.environment.base import Environment
from forge_env.errors import EnvironmentBugError, UsageError, environment_code


def number_of_tasks(env: Environment, split: str) -> int | None:
    """`env.num_tasks(split)`. `EnvironmentBugError`: it failed, or gave no number of tasks."""
    what = f"{type(env).__name__}.num_tasks"
    with environment_code(what, split):
        count = env.num_tasks(split)
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise EnvironmentBugError(f"{what} returned {count!r}", fix="return a number of tasks, or None: endless")
    return count


def count_tasks(env: Environment) -> dict[str, int | None]:
    """Tasks of every split that has any source of them, None for an endless one.

    A dataset may hold no rows for some split: that is no mistake as long as another has some.

    Raises:
        UsageError: no split can be read; as the first one raised it.
    """
    counts: dict[str, int | None] = {}
    first: UsageError | None = None
    for split in env.splits:
        try:
            counts[split] = number_of_tasks(env, split)
        except UsageError as error:
            first = first or error
    if first is not None and not any(count != 0 for count in counts.values()):
        raise first
    return counts


def check_split(env: Environment, split: str | None) -> str:
    """`split`, or the first one that has tasks; `UsageError` when the environment lacks it."""
    if split is not None and split not in env.splits:
        raise UsageError(f"there is no split {split!r}", fix=f"use one of {', '.join(env.splits)}")
    return split or next((name for name, count in count_tasks(env).items() if count != 0), env.splits[0])
