"""torchstore 0.1.2 under Monarch 0.7: import this before using the store, in every process.

Its controller mixes plain and asynchronous endpoints, which newer Monarch refuses; this subclass makes all of
them asynchronous and takes its place. And where there is no RDMA it sends tensors as messages: here their memory is
shared or fetched instead (`trainers.weights.shared`).
"""

from __future__ import annotations

from typing import Any

import torch
import torchstore.api
from torchstore.controller import Controller, Trie
from torchstore.transport.buffers import MonarchTransportBuffer, RDMATransportBuffer, TransportBuffer, rdma_available
from torchstore.transport.pipe import Pipe, Request

from trainers.actors.actor import endpoint, get_or_spawn_controller
from trainers.weights import shared

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


class SharedTransportBuffer(MonarchTransportBuffer):  # type: ignore[misc]
    """TorchStore's transport that sends a handle of what lies in a block, and other tensors with the message."""

    def __init__(self) -> None:
        super().__init__()
        self.handle: shared.Handle | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tensor": self.tensor if self.handle is None else None}

    async def write_from(self, tensor: torch.Tensor | None) -> None:
        """Offer a tensor."""
        self.tensor = tensor
        self.handle = None if tensor is None else shared.handle(tensor)

    async def read_into(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Take what the other side offers: mapped, or copied, which it is from other machines and into `tensor`."""
        if self.handle is not None and self.handle.host != shared.host():
            return await shared.fetch(self.handle, tensor)
        if self.handle is not None:
            self.tensor = shared.attach(self.handle)
        taken: torch.Tensor = await super().read_into(tensor)
        return taken

    def update(self, other_buffer: SharedTransportBuffer) -> None:
        """Take over the other side's answer."""
        super().update(other_buffer)
        self.handle = other_buffer.handle

    async def drop(self) -> None:
        """Let go of the tensor."""
        self.tensor = None


async def open_store(processes: Any) -> None:
    """Make `processes`, a mesh of one, the store's only volume, in the place of one that may be there."""
    await forget_store()
    await torchstore.initialize(mesh=processes)


async def forget_store() -> None:
    """Let the store be without a volume. The volume itself is not asked: its process may be dead or stopped."""
    controller = await get_or_spawn_controller(torchstore.api.DEFAULT_TORCHSTORE_NAME, AsyncController)
    await controller.forget.call()
    torchstore.reset_client()


async def get(key: str, into: Any = None) -> Any:
    """What `torchstore.get` gives, with one call instead of three, since there is one volume only.

    Args:
        key: of a tensor or an object.
        into: a tensor to be filled, by default one of the transport's choice.

    Raises:
        ActorError: of a KeyError: there is nothing of this key.
    """
    client = await torchstore.client()
    volume, _ = client.strategy.select_storage_volume()
    return await Pipe(volume).get_from_storage_volume(key, Request(tensor_val=into))


def _create_transport_buffer(_: Pipe) -> TransportBuffer:
    return RDMATransportBuffer() if rdma_available() else SharedTransportBuffer()


Pipe.create_transport_buffer = _create_transport_buffer
torchstore.api.Controller = AsyncController
