"""torchstore 0.1.2 under Monarch 0.7: import this before using the store, in every process.

Its controller mixes plain and asynchronous endpoints, which newer Monarch refuses; this subclass makes all of
them asynchronous and takes its place.
"""

from __future__ import annotations

from typing import Any

import torchstore.api
from torchstore.controller import Controller

from trainers.actors.actor import endpoint

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


torchstore.api.Controller = AsyncController
