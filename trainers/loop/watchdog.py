"""Detect a run without progress: first warn, later fail, each time naming the stuck parts.

The message consists of the run's diagnosis (`diagnose`) and the innermost calls of every process that isn't idle; the
log has the stacks of all processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from forge_env.errors import ForgeError
from forge_env.figures import duration
from forge_env.run import Run
from trainers.actors.stacks import look_at_processes

T = TypeVar("T")
logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
"""Seconds between two checks."""
STARVED_S = 60.0
"""Maximum seconds counted between two checks: a run that was itself suspended or starved hasn't been stuck."""


class Watchdog:
    """Measures how long the run's progress, passed to `look` from time to time, has not changed.

    Args:
        diagnose: describes the stuck parts; called only when progress has stopped. None: names the run's stage.
    """

    def __init__(
        self, run: Run, diagnose: Callable[[], str] | None = None, *, clock: Callable[[], float] | None = None
    ) -> None:
        self._run = run
        self._warn_s, self._end_s = run.config.watchdog.warn_s, run.config.watchdog.end_s
        self._diagnose = diagnose or self._stage
        self._clock = clock
        self._progress: Hashable = object()
        self._looked = 0.0
        self._still = 0.0
        self._warned = False

    async def look(self, progress: Hashable) -> None:
        """Compare `progress` with the previous value; raise `ForgeError` after `end_s` seconds without a change."""
        now = (self._clock or asyncio.get_running_loop().time)()
        elapsed, self._looked = now - self._looked, now
        if progress != self._progress:
            self._progress, self._still, self._warned = progress, 0.0, False
            return
        self._still = stuck_s = self._still + min(elapsed, STARVED_S)
        if self._end_s and stuck_s >= self._end_s:
            raise ForgeError(
                f"no progress for {duration(stuck_s)}: {await self._what_is_stuck()}",
                fix="see run.log and timeline.json; continue with --resume. watchdog.end_s sets how long is too long",
            )
        if not self._warned and stuck_s >= self._warn_s:
            self._warned = True
            self._run.warn(f"no progress for {duration(stuck_s)}: {await self._what_is_stuck()}")

    async def _what_is_stuck(self) -> str:
        diagnosis = self._diagnose()
        processes = await look_at_processes()
        for process in processes:
            logger.info("%s\n%s", process, process.stacks.strip())
        return "; ".join([diagnosis, *(str(process) for process in processes if process.stands)])

    def _stage(self) -> str:
        """Stage and progress of a run that is starting."""
        state = self._run.state
        name = state.stage.name if state.stage else "start"
        return f"stage {name}" + (f", {state.done} of {state.total} done" if state.total else "")

    async def while_doing(self, work: Awaitable[T], progress: Callable[[], Hashable] | None = None) -> T:
        """Return the result of `work`, checking its progress every second meanwhile; raises as `look` does."""

        async def look_on() -> None:
            while True:
                await self.look((progress or self._stage)())
                await asyncio.sleep(INTERVAL_S)

        async with asyncio.TaskGroup() as group:
            looking = group.create_task(look_on())
            result = await work
            looking.cancel()
        return result
