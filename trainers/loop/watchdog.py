"""Noticing that nothing moves: first a warning that names what is stuck, in the end a failure that says the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from forge_env.errors import ForgeError
from forge_env.run import Run
from forge_env.run.state import duration


class Watchdog:
    """Told of the run's progress from time to time; knows how long it has not changed.

    Args:
        run: where to warn.
        warn_s: seconds without progress until the warning.
        end_s: seconds without progress until the run is failed; 0: never.
        diagnose: says what is stuck, asked only then.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        run: Run,
        *,
        warn_s: float,
        end_s: float,
        diagnose: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._warn_s = warn_s
        self._end_s = end_s
        self._diagnose = diagnose
        self._clock = clock
        self._progress: Hashable = None
        self._moved = clock()
        self._warned = False

    def look(self, progress: Hashable) -> None:
        """Compare `progress` with what it was; any change is movement.

        Raises:
            ForgeError: nothing has moved for `end_s`.
        """
        now = self._clock()
        if progress != self._progress:
            self._progress, self._moved, self._warned = progress, now, False
            return
        still = now - self._moved
        if self._end_s and still >= self._end_s:
            raise ForgeError(
                f"nothing has moved for {duration(still)}: {self._diagnose()}",
                fix="see run.log and timeline.json; continue with --resume. watchdog.end_s sets how long is too long",
            )
        if not self._warned and still >= self._warn_s:
            self._warned = True
            self._run.warn(f"nothing has moved for {duration(still)}: {self._diagnose()}")
