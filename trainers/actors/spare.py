"""A process that waits to be somebody: what takes long to import is imported already.

An actor that dies is then back in the time that its `setup` takes. What gets the process ready runs in a thread of the
low priority, so that it takes little from those that work.
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
"""What ends before that has no use for one."""
LOW_PRIORITY = 5
"""As `nice` counts: about a third of the time that a busy thread beside it gets; on a full machine 19 never ends."""
ANSWER_S = 2.0
"""How long one that is alive may take to answer."""
logger = logging.getLogger(__name__)


class Waiting(Actor):  # type: ignore[misc]
    """The actor of a spare process."""

    @concurrent_endpoint
    async def process_id(self) -> int:
        """Of the process that runs it."""
        return os.getpid()

    @concurrent_endpoint
    async def get_ready(self, work: Callable[[], object]) -> None:
        """Do `work`, in no hurry."""
        # a thread of its own, which nobody uses afterwards: only the kernel's administrator may raise a priority again
        with ThreadPoolExecutor(1, initializer=self._yield) as thread:
            await asyncio.get_running_loop().run_in_executor(thread, work)

    @staticmethod
    def _yield() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)  # on Linux: of this thread

    @concurrent_endpoint
    async def become(self, environment: Mapping[str, str]) -> None:
        """Take the environment of whoever this is to be.

        Raises:
            RuntimeError: it is too late for that, since CUDA has looked at it.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            raise RuntimeError("CUDA was initialized while it got ready")
        os.environ.update(environment)


class Spare:
    """Processes that wait for an actor, with `work` done already; when they are taken, the next can be prepared.

        counters = await Counter.options(num_replicas=2, spare=Spare(import_numpy)).as_service()

    They only save time: where they are not ready, or have died, new processes do as well.

    Args:
        work: a function of a module, mostly imports. It must not initialize CUDA.
        first_after_s: how long to wait before the first are prepared.
    """

    def __init__(self, work: Callable[[], object], first_after_s: float = FIRST_AFTER_S) -> None:
        self._do = work
        self._after_s = first_after_s
        self._work: asyncio.Task[None] | None = None
        self._mesh: ProcMesh | None = None
        self._actor: Any = None
        self.pids: list[int] = []
        """Of the newest processes."""
        self.ready = asyncio.Event()
        """Set while they can be taken."""

    def prepare(self, count: int, name: str, environment: Mapping[str, str]) -> None:
        """See to it that there will be `count` processes with at least this environment, unless there are."""
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
        except Exception as error:  # whatever it was, the run can do without
            logger.info("%s: %s", name, error, exc_info=None if isinstance(error, ForgeError) else error)
            await self._drop()

    async def take(self, environment: Mapping[str, str]) -> ProcMesh | None:
        """The processes, with `environment`, now the caller's to end; None: there are none that are ready."""
        if not self.ready.is_set():
            return None
        self.ready.clear()
        mesh, self._mesh = self._mesh, None  # at once: whoever asks next must not get the same
        actor, pids = self._actor, self.pids
        try:
            async with asyncio.timeout(ANSWER_S):
                await result(actor.become.call(dict(environment)))
        except BaseException as error:  # dead, stopped or too late: the run can do without; cancelled: nothing is left
            await stop_processes(mesh, pids, dead=True)
            if not isinstance(error, Exception):
                raise
            logger.info("the spare process is of no use: %s", error)
            return None
        return mesh

    async def _drop(self) -> None:
        self.ready.clear()
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            await stop_processes(mesh, self.pids, dead=True)

    async def close(self) -> None:
        """End them."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        await self._drop()
