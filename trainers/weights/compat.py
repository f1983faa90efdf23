"""Compatibility of torchstore 0.1.2 with Monarch 0.7. Every process must import this module before using the store.

torchstore's controller mixes synchronous and asynchronous endpoints, which Monarch 0.7 refuses. The subclass here makes
all of them asynchronous and replaces the controller in `torchstore.api`.
"""

from __future__ import annotations

from typing import Any

import torchstore.api
from torchstore.controller import Controller, Trie
from torchstore.transport.pipe import Pipe, Request

from trainers.actors.actor import endpoint, get_or_spawn_controller

_PLAIN = ("get_controller_strategy", "locate_volumes", "notify_put", "keys", "notify_delete")


def _asynchronous(name: str) -> Any:
    method = getattr(Controller, name)._method

    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__name__ = name
    call.__qualname__ = f"AsyncController.{name}"
    return endpoint(call)


class AsyncController(Controller):  # type: ignore[misc]
    """torchstore's controller with asynchronous endpoints only."""

    get_controller_strategy = _asynchronous("get_controller_strategy")
    locate_volumes = _asynchronous("locate_volumes")
    notify_put = _asynchronous("notify_put")
    keys = _asynchronous("keys")
    notify_delete = _asynchronous("notify_delete")

    @endpoint
    async def forget(self) -> None:
        """Reset to no volume and no keys, so that `init` can be called again."""
        self.is_initialized = False
        self.keys_to_storage_volumes = Trie()


async def open_store(processes: Any) -> None:
    """Make `processes`, a mesh of one process, the store's only volume, replacing any previous one."""
    await forget_store()
    await torchstore.initialize(mesh=processes)


async def forget_store() -> None:
    """Remove the store's volume, without calling the volume's process, which may be dead or stopped."""
    controller = await get_or_spawn_controller(torchstore.api.DEFAULT_TORCHSTORE_NAME, AsyncController)
    await controller.forget.call()
    torchstore.reset_client()


async def get(key: str) -> Any:
    """Return the same object as `torchstore.get` with one call instead of three, which one volume makes possible.

    Raises:
        ActorError: caused by a KeyError: the key does not exist.
    """
    client = await torchstore.client()
    volume, _ = client.strategy.select_storage_volume()
    return await Pipe(volume).get_from_storage_volume(key, Request())


torchstore.api.Controller = AsyncController
