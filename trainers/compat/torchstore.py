"""TorchStore: its controller, made to run under Monarch 0.7. Import this module before using the store.

TorchStore's controller mixes synchronous and asynchronous endpoints, which Monarch 0.7 refuses. The subclass here makes
all of them asynchronous and replaces the controller in `torchstore.api`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torchstore.api
from monarch.actor import endpoint, get_or_spawn_controller
from torchstore.controller import Controller, Trie

from trainers.compat import Package

PACKAGE = Package("torchstore", ("0.1.2",))
SYNCHRONOUS = ("get_controller_strategy", "locate_volumes", "notify_put", "keys", "notify_delete")
"""The controller's synchronous endpoints."""


def _method(name: str) -> Any:
    method = PACKAGE.get(f"torchstore.controller:Controller.{name}._method")
    PACKAGE.require(not inspect.iscoroutinefunction(method), f"Controller.{name} is synchronous")
    return method


def _asynchronous(name: str) -> Any:
    method = _method(name)

    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__name__ = name
    call.__qualname__ = f"AsyncController.{name}"
    return endpoint(call)


class AsyncController(Controller):  # type: ignore[misc]
    """TorchStore's controller with asynchronous endpoints only."""

    get_controller_strategy = _asynchronous("get_controller_strategy")
    locate_volumes = _asynchronous("locate_volumes")
    notify_put = _asynchronous("notify_put")
    keys = _asynchronous("keys")
    notify_delete = _asynchronous("notify_delete")

    @endpoint
    async def forget(self) -> None:
        """Reset to no volumes and no keys, so that `init` can be called again.

        Unlike `teardown`, this doesn't call the volumes, whose processes may be dead or stopped.
        """
        names = {"is_initialized", "keys_to_storage_volumes"}
        PACKAGE.require(names <= vars(self).keys(), f"a Controller has the attributes {names}")
        self.is_initialized = False
        self.keys_to_storage_volumes = Trie()


async def forget_store() -> None:
    """Remove the store's volumes and keys."""
    controller = await get_or_spawn_controller(torchstore.api.DEFAULT_TORCHSTORE_NAME, AsyncController)
    await controller.forget.call()
    torchstore.reset_client()


PACKAGE.require(
    PACKAGE.get("torchstore.api:Controller") in (Controller, AsyncController), "torchstore.api spawns its `Controller`"
)
torchstore.api.Controller = AsyncController
