"""torchstore 0.1.2 under Monarch 0.7: import this before using the store, in every process.

Its controller mixes plain and asynchronous endpoints, which newer Monarch refuses; this subclass makes all of
them asynchronous and takes its place.
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
        """Know of no volume and no key, so that `init` can be called again."""
        self.is_initialized = False
        self.keys_to_storage_volumes = Trie()


async def open_store(processes: Any) -> None:
    """Make `processes`, a mesh of one, the store's only volume, in the place of one that may be there."""
    await forget_store()
    await torchstore.initialize(mesh=processes)


async def forget_store() -> None:
    """Let the store be without a volume. The volume itself is not asked: its process may be dead or stopped."""
    controller = await get_or_spawn_controller(torchstore.api.DEFAULT_TORCHSTORE_NAME, AsyncController)
    await controller.forget.call()
    torchstore.reset_client()


async def get(key: str) -> Any:
    """The object that `torchstore.get` gives, with one call instead of three, since there is one volume only.

    Raises:
        ActorError: of a KeyError: there is nothing of this key.
    """
    client = await torchstore.client()
    volume, _ = client.strategy.select_storage_volume()
    return await Pipe(volume).get_from_storage_volume(key, Request())


torchstore.api.Controller = AsyncController
