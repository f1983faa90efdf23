"""Noticing that nothing moves: first a warning that names what is stuck, in the end a failure that says the same.

What is stuck is what the run knows of it (`diagnose`), and the stack of every process that is not merely waiting to be
called; the log has the stacks of all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from forge_env.config.recipe import WatchdogSection
from forge_env.display.terminal import duration
from forge_env.errors import ForgeError
from forge_env.run import Run
from trainers.actors.stacks import look_at_processes

T = TypeVar("T")
logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
"""Between two looks."""
STARVED_S = 60.0
"""The most that counts between two looks: a run that was stopped itself, or starved, has not been idle."""


class Watchdog:
    """Told of the run's progress from time to time; knows how long it has not changed.

    Args:
        run: where to warn.
        section: how long is too long.
        diagnose: says what is stuck, asked only then.
        clock: seconds; the event loop's if not given.
    """

    def __init__(
        self,
        run: Run,
        section: WatchdogSection,
        diagnose: Callable[[], str],
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._run = run
        self._warn_s = section.warn_s
        self._end_s = section.end_s
        self._diagnose = diagnose
        self._clock = clock
        self._progress: Hashable = object()
        self._looked = 0.0
        self._still = 0.0
        self._warned = False

    async def look(self, progress: Hashable) -> None:
        """Compare `progress` with what it was; any change is movement.

        Raises:
            ForgeError: no progress for `end_s`.
        """
        now = (self._clock or asyncio.get_running_loop().time)()
        since, self._looked = now - self._looked, now
        if progress != self._progress:
            self._progress, self._still, self._warned = progress, 0.0, False
            return
        self._still = still = self._still + min(since, STARVED_S)
        if self._end_s and still >= self._end_s:
            raise ForgeError(
                f"no progress for {duration(still)}: {await self._what_is_stuck()}",
                fix="see run.log and timeline.json; continue with --resume. watchdog.end_s sets how long is too long",
            )
        if not self._warned and still >= self._warn_s:
            self._warned = True
            self._run.warn(f"no progress for {duration(still)}: {await self._what_is_stuck()}")

    async def _what_is_stuck(self) -> str:
        said = self._diagnose()
        processes = await look_at_processes()
        for process in processes:
            logger.info("%s\n%s", process, process.stacks.strip())
        return "; ".join([said, *(str(process) for process in processes if process.stands)])

    async def while_doing(self, work: Awaitable[T], progress: Callable[[], Hashable]) -> T:
        """What `work` returns; its progress is looked at every second meanwhile; raises as `look` does."""
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look_on(progress))
            done = await work
            looking.cancel()
        return done

    async def _look_on(self, progress: Callable[[], Hashable]) -> None:
        while True:
            await self.look(progress())
            await asyncio.sleep(INTERVAL_S)
