"""Sandboxes in E2B's cloud (https://e2b.dev): virtual machines, each reused after it was wiped and checked."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from typing import TYPE_CHECKING

from forge_env.errors import SandboxError, SandboxUnavailableError
from forge_env.sandbox import SandboxSpec
from sandboxes import owner
from sandboxes.box import Box
from sandboxes.images import BUNDLED
from sandboxes.pool import MAX_USES, RemoteEngine

if TYPE_CHECKING:
    from e2b import AsyncSandbox

logger = logging.getLogger(__name__)
KEY = "E2B_API_KEY"
LEASE_S = 300
"""Seconds after which E2B ends a sandbox whose lease was not renewed, because its owner is dead."""
RENEW_S = 90.0


class E2BEngine(RemoteEngine):
    """Sandboxes in virtual machines of E2B. The key and addresses come from E2B's variables, such as `E2B_API_KEY`.

    Args:
        base_image: template of the machines, with Python 3.9 or newer (default: `base`).
        start_timeout_s: seconds until a machine must be running.
        concurrency: most sandboxes alive at once; by default four per CPU of this machine. E2B has a limit of its own.
        warm: sandboxes to start ahead; by default one per CPU.
        max_uses: leases after which a sandbox is replaced by a new one.
    """

    name = "e2b"
    automatic = False  # it costs money

    def __init__(
        self,
        *,
        base_image: str = "base",
        start_timeout_s: float = 60.0,
        concurrency: int | None = None,
        warm: int | None = None,
        max_uses: int = MAX_USES,
    ) -> None:
        super().__init__(concurrency=concurrency, warm=warm, max_uses=max_uses)
        self.base_image = base_image
        self._start_timeout_s = start_timeout_s
        self._boxes: dict[str, tuple[Box, AsyncSandbox]] = {}
        self._renewal: asyncio.Task[None] | None = None

    @classmethod
    def unavailable_reason(cls) -> str | None:  # noqa: D102
        try:
            import e2b
        except ImportError:
            return 'it needs e2b: pip install "forge-env[e2b]"'
        if not os.environ.get(KEY):
            return f"{KEY} is not set"
        try:
            e2b.Sandbox.list(limit=1).next_items()
        except Exception as error:  # noqa: BLE001  the client's errors, and those of its HTTP library, share no base
            return f"E2B refused: {error}"
        return None

    async def _prepare(self) -> None:
        self._renewal = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Renew the leases of all sandboxes, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            boxes = [box for box, _ in self._boxes.values()]
            renewals = [machine.set_timeout(LEASE_S) for _, machine in self._boxes.values()]
            for box, error in zip(boxes, await asyncio.gather(*renewals, return_exceptions=True), strict=True):
                if error is not None and box.connection.alive:
                    logger.warning("E2B did not renew the lease of sandbox %s: %s", box.name, error)

    async def close(self) -> None:  # noqa: D102
        await super().close()
        if self._renewal is not None:
            self._renewal.cancel()

    async def _remove(self, name: str) -> None:
        """Remove a sandbox. If E2B does not confirm it, it ends with its lease."""
        _, machine = self._boxes.pop(name)
        with contextlib.suppress(Exception):  # any error of the client
            await machine.kill()

    async def _make_box(self, spec: SandboxSpec) -> Box:
        from sandboxes.e2b.attachment import attach

        template = self.base_image if spec.image == BUNDLED else spec.image
        box: Box | None = None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                machine = await self._create(template, spec.network)
                box = Box(machine.sandbox_id, spec, functools.partial(self._remove, machine.sandbox_id))
                self._boxes[box.name] = box, machine
                await attach(machine, spec, box.connection)
                await box.ready()
        except BaseException as error:  # also when cancelled: no machine may be left behind
            if box is not None:
                await box.destroy()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"E2B started no sandbox within {self._start_timeout_s:g} s") from None
            if isinstance(error, Exception):
                raise _translated(error, template) from error
            raise
        return box

    async def _create(self, template: str, network: bool) -> AsyncSandbox:
        """Create a virtual machine. If cancelled, it is created and removed."""
        from e2b import AsyncSandbox

        metadata = {owner.LABEL: owner.this_process()}
        creating = asyncio.ensure_future(
            AsyncSandbox.create(template, timeout=LEASE_S, metadata=metadata, allow_internet_access=network)
        )
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # any error of the client: nothing was created
                await (await creating).kill()
            raise


def _translated(error: Exception, template: str) -> Exception:
    """An error of E2B's client as one of ours."""
    import e2b

    if isinstance(error, SandboxError | SandboxUnavailableError):
        return error
    if isinstance(error, e2b.AuthenticationException):
        return SandboxUnavailableError(f"E2B refused the key: {error}", fix=f"set {KEY}")
    if isinstance(error, e2b.SandboxException) and error.status_code in (400, 404):
        return SandboxUnavailableError(f"E2B can't start template {template!r}: {error}", fix="name one of yours")
    return SandboxError(f"E2B started no sandbox: {error}")
