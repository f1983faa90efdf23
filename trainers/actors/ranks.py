"""Actors that are several processes acting as one: torch's process group between them, set up before `setup`."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

from trainers.actors.actor import ForgeActor, endpoint, own_rank
from trainers.actors.remote import result

LOOPBACK = "127.0.0.1"
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
                host = LOOPBACK if cls.ground is None else cls.ground.address
                address = await result(actor.slice(procs=0).open_meeting_point.call_one(cls.procs, host))
                await result(actor.join.call(address, cls.procs, cls.with_gpus))
            except BaseException:  # cancelled too: no process may be left
                await cls.shutdown(actor)
                raise
        return actor

    @endpoint
    async def open_meeting_point(self, size: int, host: str) -> tuple[str, int]:
        """Serve, in the first process, the store through which `size` processes find each other; its address."""
        self.meeting_point = serve_store(host, size)
        return host, self.meeting_point.port

    @endpoint
    async def join(self, address: tuple[str, int], size: int, with_gpus: bool) -> None:
        """Become one rank of `size`."""
        self.rank = own_rank()
        _use_network(address[0])
        join(self.meeting_point or find_store(*address, size), self.rank, size, with_gpus=with_gpus)


def serve_store(host: str, size: int) -> Any:
    """The store through which `size` processes find each other, served at an address of this machine only."""
    import torch.distributed as dist

    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port, descriptor = listening.getsockname()[1], listening.detach()  # the store closes it
    options: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
    return dist.TCPStore(host, port, size, **options)  # type: ignore[attr-defined]


def find_store(host: str, port: int, size: int) -> Any:
    """The same, from another process."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, size, wait_for_workers=False)  # type: ignore[attr-defined]


def join(store: Any, rank: int, size: int, *, with_gpus: bool) -> None:
    """Make this process rank `rank` of `size`."""
    import torch
    import torch.distributed as dist

    if with_gpus:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "nccl" if with_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)


def _use_network(host: str) -> None:
    """Let ranks talk over the network through which this machine reaches `host`, and listen on no other."""
    import psutil

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))  # sends nothing
        own = ipaddress.ip_address(way.getsockname()[0])
    if own.is_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # NCCL has better than that
        return
    for name, addresses in psutil.net_if_addrs().items():
        if str(own) in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def leave() -> None:
    """Undo `join`."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
