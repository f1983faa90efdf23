"""Rate of failures of an environment's own code, above which a run or an evaluation is aborted."""

from __future__ import annotations

from collections import deque

WINDOW = 100
"""Number of most recent results over which the rate is computed."""
MINIMUM = 20
"""Number of results needed before the rate is checked."""


class BugRate:
    """Rate of environment bugs among recent results.

    Args:
        unit: name of the results in messages, in the plural.
    """

    def __init__(self, limit: float, unit: str) -> None:
        self._limit = limit
        self._unit = unit
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._last = ""

    def add(self, bug: str | None) -> str | None:
        """Count a result, with the error of the environment's code if it failed.

        Returns:
            A message if the rate exceeds the limit, otherwise None.
        """
        self._recent.append(bug is not None)
        self._last = bug or self._last
        rate = sum(self._recent) / len(self._recent)
        if len(self._recent) < MINIMUM or rate <= self._limit:
            return None
        return (
            f"the environment's own code failed on {rate:.0%} of the last {len(self._recent)} {self._unit}, "
            f"the last time: {self._last}"
        )
