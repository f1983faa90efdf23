"""The rollout worker as an actor: a process that plays episodes on its own event loop."""

from __future__ import annotations

from contextlib import ExitStack

from forge_env.logs import log_to
from forge_env.loop_guard import LoopGuard
from forge_env.redaction import learn
from forge_env.run.folder import RunFolder
from trainers.actors.actor import Served, concurrent_endpoint
from trainers.actors.processes import own_host, own_log, settle_heap
from trainers.rollout.local import LocalWorker, WorkerSettings
from trainers.rollout.types import WorkerStatus


class RolloutWorker(Served, interface=LocalWorker):
    """A `LocalWorker` behind endpoints, which run concurrently."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._open = ExitStack()

    @concurrent_endpoint
    async def setup(self) -> None:
        """Open the sandbox engine and create the environment and the algorithm's `Preparation`."""
        config = self._settings.config
        learn(config.model_dump(mode="json"))
        self._open.enter_context(log_to(own_log(RunFolder(self._settings.folder).log)))
        self.served = LocalWorker(self._settings, own_host())
        await self.served.setup()
        # the callback does nothing, since LoopGuard writes its warnings to the log
        guard = LoopGuard(config.watchdog.warn_s, 0.0, lambda text: None, code_s=self.served.code_timeout_s)
        self._open.enter_context(guard)
        settle_heap()

    @concurrent_endpoint
    async def close(self) -> WorkerStatus:
        """See `LocalWorker.close`."""
        status: WorkerStatus = await self.served.close()
        self._open.close()
        return status
