"""Pre-warmed spare processes: slow imports are already done when an actor takes one.

A dead actor is then restarted in the time that its `setup` takes. Processes are warmed up in a low-priority thread, so
that this takes little time from working ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from monarch.actor import Actor, ProcMesh, concurrent_endpoint

from forge_env.errors import ForgeError
from trainers.actors.processes import start_processes, stop_processes
from trainers.actors.remote import result

FIRST_AFTER_S = 120.0
"""Seconds before the first spare is prepared; shorter runs don't need one."""
LOW_PRIORITY = 5
"""Niceness: about a third of a competing busy thread's CPU time. With 19, preparation never ends on a full machine."""
ANSWER_S = 2.0
"""Seconds that a spare process has to answer before it is considered dead."""
logger = logging.getLogger(__name__)


class Waiting(Actor):  # type: ignore[misc]
    """The actor of a spare process."""

    @concurrent_endpoint
    async def process_id(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()

    @concurrent_endpoint
    async def get_ready(self, work: Callable[[], object]) -> None:
        """Run `work` at low priority."""
        # in a thread that isn't used afterwards: without privileges its priority can't be raised again
        with ThreadPoolExecutor(1, initializer=self._yield) as thread:
            await asyncio.get_running_loop().run_in_executor(thread, work)

    @staticmethod
    def _yield() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)  # on Linux: affects only this thread

    @concurrent_endpoint
    async def become(self, environment: Mapping[str, str]) -> None:
        """Set the environment variables of the actor that takes this process.

        Raises:
            RuntimeError: CUDA is already initialized, so variables such as CUDA_VISIBLE_DEVICES have no effect.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            raise RuntimeError("CUDA was initialized during preparation")
        os.environ.update(environment)


class Spare:
    """Spare processes for an actor, in which `work` has already run; after they are taken, new ones can be prepared.

        counters = await Counter.options(num_replicas=2, spare=Spare(import_numpy)).as_service()

    They only save time: if they are not ready, or have died, new processes are started instead.

    Args:
        work: a module-level function, mostly imports; must not initialize CUDA.
    """

    def __init__(self, work: Callable[[], object], first_after_s: float = FIRST_AFTER_S) -> None:
        self._do = work
        self._after_s = first_after_s
        self._work: asyncio.Task[None] | None = None
        self._mesh: ProcMesh | None = None
        self._actor: Any = None
        self.pids: list[int] = []
        self.ready = asyncio.Event()

    def prepare(self, count: int, name: str, environment: Mapping[str, str]) -> None:
        """Start preparing `count` processes with at least this environment, unless some exist or are being prepared."""
        if self._mesh is None and (self._work is None or self._work.done()):
            self._work = asyncio.create_task(self._prepare(count, f"{name}-spare", environment))

    async def _prepare(self, count: int, name: str, environment: Mapping[str, str]) -> None:
        await asyncio.sleep(self._after_s)
        self._after_s = 0.0
        try:
            self._mesh = await start_processes(count, name, environment)
            self._actor = self._mesh.spawn("waiting", Waiting)
            self.pids = [pid for _, pid in (await result(self._actor.process_id.call())).items()]
            await result(self._actor.get_ready.call(self._do))
            self.ready.set()
        except Exception as error:  # any failure: the run continues without spares
            logger.info("%s: %s", name, error, exc_info=None if isinstance(error, ForgeError) else error)
            await self._drop()

    async def take(self, environment: Mapping[str, str]) -> ProcMesh | None:
        """Hand over the processes with `environment` set; the caller must end them. None if none are ready."""
        if not self.ready.is_set():
            return None
        self.ready.clear()
        mesh, self._mesh = self._mesh, None  # before the first await, so that they are handed over only once
        actor, pids = self._actor, self.pids
        try:
            async with asyncio.timeout(ANSWER_S):
                await result(actor.become.call(dict(environment)))
        except BaseException as error:
            # The processes may be dead, stopped, or have initialized CUDA; after a cancellation none may be left.
            await stop_processes(mesh, pids, dead=True)
            if not isinstance(error, Exception):
                raise
            logger.info("the spare process was discarded: %s", error)
            return None
        return mesh

    async def _drop(self) -> None:
        self.ready.clear()
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            await stop_processes(mesh, self.pids, dead=True)

    async def close(self) -> None:
        """Stop preparing, and end the spare processes."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        await self._drop()
