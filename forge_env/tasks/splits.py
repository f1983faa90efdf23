"""Numbers of tasks in an environment's splits."""

from __future__ import annotations

from forge_env.environment.base import Environment
from forge_env.errors import EnvironmentBugError, UsageError, environment_code


def number_of_tasks(env: Environment, split: str) -> int | None:
    """Call `env.num_tasks(split)`. Raises `EnvironmentBugError` if it fails or returns an invalid number."""
    what = f"{type(env).__name__}.num_tasks"
    with environment_code(what, split):
        count = env.num_tasks(split)
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise EnvironmentBugError(f"{what} returned {count!r}", fix="return a number of tasks, or None: endless")
    return count


def count_tasks(env: Environment) -> dict[str, int | None]:
    """Number of tasks of every split that can be read, None for an endless one.

    A dataset may have no rows for some splits: that is not an error as long as another split has some.
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
    """`split`, or the first split with tasks if None. Raises `UsageError` if the environment lacks it."""
    if split is not None and split not in env.splits:
        raise UsageError(f"there is no split {split!r}", fix=f"use one of {', '.join(env.splits)}")
    return split or next((name for name, count in count_tasks(env).items() if count != 0), env.splits[0])
