"""Actors that are several processes acting as one: torch's process group between them, set up before `setup`."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from trainers.actors.actor import ForgeActor, endpoint, own_rank
from trainers.actors.remote import result

# Longest wait for another rank; a rank that died ends the others through Monarch, long before.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class RankedActor(ForgeActor):
    """A `ForgeActor` whose processes are the ranks of one process group. Alone, it needs none."""

    meeting_point: Any = None
    rank: int = 0
    """Of this process among all; endpoints may be called on some of them only."""

    @classmethod
    async def launch(cls, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and let them find each other."""
        actor = await super().launch(*args, **kwargs)
        if cls.procs > 1:
            try:
                address = await result(actor.slice(procs=0).open_meeting_point.call_one(cls.procs))
                await result(actor.join.call(address, cls.procs, cls.with_gpus))
            except BaseException:  # cancelled too: no process may be left
                await cls.shutdown(actor)
                raise
        return actor

    @endpoint
    async def open_meeting_point(self, size: int) -> tuple[str, int]:
        """Serve, in the first process, the store through which `size` processes find each other; its address."""
        host = socket.gethostname() if self.hosts else "127.0.0.1"
        self.meeting_point = open_store(host, 0, size, serve=True)
        return host, self.meeting_point.port

    @endpoint
    async def join(self, address: tuple[str, int], size: int, with_gpus: bool) -> None:
        """Become one rank of `size`."""
        self.rank = own_rank()
        join(self.meeting_point or open_store(*address, size), self.rank, size, with_gpus=with_gpus)


def open_store(host: str, port: int, size: int, *, serve: bool = False) -> Any:
    """The store through which `size` processes find each other, on its host or from another process."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, size, is_master=serve, wait_for_workers=False)  # type: ignore[attr-defined]


def join(store: Any, rank: int, size: int, *, with_gpus: bool) -> None:
    """Make this process rank `rank` of `size`."""
    import torch
    import torch.distributed as dist

    if with_gpus:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if with_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)


def leave() -> None:
    """Undo `join`."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
