"""The rollout worker as an actor: a process that plays episodes on its own event loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from forge_env.logs import log_to
from forge_env.loop_guard import LoopGuard
from forge_env.redaction import learn
from forge_env.run.folder import RunFolder
from trainers.actors.actor import ForgeActor, concurrent_endpoint
from trainers.actors.processes import own_host, own_log, settle_heap
from trainers.actors.withdrawal import Withdrawable
from trainers.rollout.local import LocalWorker, WorkerSettings
from trainers.rollout.types import GroupReport, HeldOut, HeldOutReport, Links, RollOut, WorkerStatus


class RolloutWorker(ForgeActor):
    """A `LocalWorker` behind endpoints.

    Endpoints run concurrently. Their `call` argument is an id by which `withdraw` can cancel the call.

    Args:
        settings: the worker's configuration.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._calls = Withdrawable()
        self._held_up, self._logging = ExitStack(), ExitStack()

    @concurrent_endpoint
    async def setup(self) -> None:
        """Open the sandbox engine and create the environment and the algorithm's `Preparation`."""
        learn(self._settings.config.model_dump(mode="json"))
        self._logging.enter_context(log_to(own_log(RunFolder(self._settings.folder).log)))
        self._worker = LocalWorker(self._settings, own_host())
        await self._worker.setup()
        warn_s, code_s = self._settings.config.watchdog.warn_s, self._worker.code_timeout_s
        # the callback does nothing, since LoopGuard writes its warnings to the log
        self._held_up.enter_context(LoopGuard(warn_s, 0.0, lambda text: None, code_s=code_s))
        settle_heap()

    @concurrent_endpoint
    async def check_prompts(self) -> None:
        """See `LocalWorker.check_prompts`."""
        await self._worker.check_prompts()

    @concurrent_endpoint
    async def connect(self, links: Links) -> None:
        """See `LocalWorker.connect`."""
        await self._worker.connect(links)

    @concurrent_endpoint
    async def restore(self, state: Mapping[str, Any], set_aside: Iterable[str]) -> None:
        """See `LocalWorker.restore`."""
        await self._worker.restore(state, set_aside)

    @concurrent_endpoint
    async def roll_out(self, request: RollOut, call: str = "") -> GroupReport | None:
        """See `LocalWorker.roll_out`; returns None if the call was withdrawn."""
        return await self._calls.until_withdrawn(call, self._worker.roll_out(request))

    @concurrent_endpoint
    async def evaluate(self, request: HeldOut, call: str = "") -> HeldOutReport | None:
        """See `LocalWorker.evaluate`; returns None if the call was withdrawn."""
        return await self._calls.until_withdrawn(call, self._worker.evaluate(request))

    @concurrent_endpoint
    async def withdraw(self, call: str) -> None:
        """Cancel a call whose caller no longer waits for it."""
        self._calls.withdraw(call)

    @concurrent_endpoint
    async def get_status(self) -> WorkerStatus:
        """See `LocalWorker.get_status`."""
        return await self._worker.get_status()

    @concurrent_endpoint
    async def close(self) -> WorkerStatus:
        """See `LocalWorker.close`."""
        status = await self._worker.close()
        self._held_up.close()
        self._logging.close()
        return status
