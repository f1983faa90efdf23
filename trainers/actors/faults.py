"""Unexpected ends of processes.

Monarch's own answer is to interrupt the controller's main thread, which looks like somebody's Ctrl-C. Here the work
that needs the process is cancelled, and the error says which process it was and what ended it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

import monarch.actor

from forge_env.errors import ForgeError

T = TypeVar("T")
logger = logging.getLogger(__name__)
_NAMED_S = 2.0
_INNER = ("setup", "logger")
"""Monarch's own actors in each process. The failure of ours, which has a name to show, follows theirs."""


_wanted = False


def expect_ends() -> None:
    """From here on processes are ended on purpose: what Monarch says of that is logged and is no failure."""
    global _wanted
    _wanted = True


async def unless_a_process_dies(work: Coroutine[Any, Any, T]) -> T:
    """Do `work`.

    Raises:
        ForgeError: a process of an actor ended by itself.
    """
    global _wanted
    _wanted = False
    task = asyncio.ensure_future(work)
    faults = _Faults(task)
    before, monarch.actor.unhandled_fault_hook = monarch.actor.unhandled_fault_hook, faults.hook
    try:
        return await task
    except asyncio.CancelledError:
        if faults.seen and not faults.outer_cancelled():
            raise await faults.error from None
        raise
    except Exception as error:  # whatever it was: where a process died, that is a consequence
        if faults.seen:
            raise await faults.error from error
        raise
    finally:
        task.cancel()
        monarch.actor.unhandled_fault_hook = before


class _Faults:
    def __init__(self, task: asyncio.Future[Any]) -> None:
        self.task = task
        self.seen = False
        self._outer = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self.error: asyncio.Future[ForgeError] = self._loop.create_future()

    def outer_cancelled(self) -> bool:
        """Whether somebody else asked for an end too."""
        return self._outer is not None and self._outer.cancelling() > 0

    def hook(self, failure: Any) -> None:
        """Called by Monarch, in a thread of its own."""
        self._loop.call_soon_threadsafe(self._note, str(failure.mesh_name), str(failure.report()))

    def _note(self, mesh: str, report: str) -> None:
        name, why = mesh.rpartition("-")[0], report.strip().splitlines()[-1].strip()
        if _wanted and not self.seen:
            logger.info("while processes are ended: %s: %s", name or mesh, why)
            return
        if name not in _INNER:
            self._end(f"the process of {name}", why)
        elif not self.seen:
            self._loop.call_later(_NAMED_S, self._end, "a process of the run", why)
        self.seen = True

    def _end(self, who: str, why: str) -> None:
        if self.error.done():
            return
        killed = re.search(r"Killed\(sig=(\d+)\)", why)
        reason = f"was killed by signal {killed[1]}" if killed else f"ended: {why}"
        fix = "see run.log, then continue with --resume"
        if killed and killed[1] == "9":
            fix += "; signal 9 is also what the kernel sends when memory runs out"
        self.error.set_result(ForgeError(f"{who} {reason}", fix=fix))
        self.task.cancel()
