"""Actors that are several processes acting as one: torch's process group between them, set up before `setup`."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import tempfile
from collections.abc import Awaitable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forge_env.errors import InfrastructureError
from trainers.actors.actor import ForgeActor, concurrent_endpoint, endpoint, own_rank
from trainers.actors.gloo import GLOO_NETWORK, LOOPBACK, close_complete_groups
from trainers.actors.remote import ActorDiedError, result
from trainers.actors.sockets import private_folder

T = TypeVar("T")
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
                host = None if cls.ground is None else cls.ground.address
                address = await result(actor.slice(procs=0).open_meeting_point.call_one(cls.procs, host))
                await result(actor.join.call(address, cls.procs, cls.with_gpus))
            except BaseException:  # cancelled too: no process may be left
                await cls.shutdown(actor)
                raise
        return actor

    @endpoint
    async def open_meeting_point(self, size: int, host: str | None) -> Path | tuple[str, int]:
        """Choose, in the first process, where `size` processes find each other.

        Args:
            size: of them.
            host: address of this host, at which a store is served; None: all are on this machine, and share a file.
        """
        if host is None:
            return Path(tempfile.mkdtemp(prefix="ranks-", dir=private_folder()), "store")
        self.meeting_point = serve_store(host, size)
        return host, self.meeting_point.port

    @endpoint
    async def join(self, address: Path | tuple[str, int], size: int, with_gpus: bool) -> None:
        """Become one rank of `size`."""
        self.rank = own_rank()
        if isinstance(address, Path):
            store = file_store(address, size)
        else:
            _use_network(address[0])
            store = self.meeting_point or find_store(*address, size)
        join(store, self.rank, size, with_gpus=with_gpus)


class Followers:
    """The other processes of an actor, as its first one sees them.

    Args:
        actor: sliced to them.
        died: raised when one of them has died, and with it the whole actor.
    """

    def __init__(self, actor: Any, died: type[InfrastructureError]) -> None:
        self._actor = actor
        self._died = died

    async def call(self, endpoint: str, *args: Any) -> None:
        """One endpoint on all of them.

        Raises:
            InfrastructureError: `died`.
        """
        try:
            await result(getattr(self._actor, endpoint).call(*args))
        except ActorDiedError as error:
            raise self._died(f"another process of this actor died: {error}") from error

    async def beside(self, own: Awaitable[Any], endpoint: str, *args: Any) -> Any:
        """Do `own` here while `endpoint` runs there; returns what `own` does."""
        # theirs first: `own` may block this thread until they have joined it
        there = asyncio.ensure_future(self.call(endpoint, *args))
        try:
            # a failure there is raised at once: here the collective would wait for the other side
            _, value = await asyncio.gather(there, own)
        finally:
            there.cancel()
        return value


class LedActor(RankedActor):
    """A `RankedActor` whose first process speaks for all: `launch` gives back that one alone.

    It passes on to the others what they have to do, so that they do it in one order whoever called. What an endpoint
    does there and here at once goes through `with_followers`.
    """

    followers: Followers | None = None
    """Of the first of several processes."""
    died: ClassVar[type[InfrastructureError]] = InfrastructureError
    """Raised by the first process when another has died."""

    @classmethod
    async def launch(cls, *args: Any, **kwargs: Any) -> Any:
        """Start the processes, the first of which is told of the others."""
        actor = await super().launch(*args, **kwargs)
        if cls.procs == 1:
            return actor
        leader = actor.slice(procs=0)
        leader._forge_proc_mesh, leader._forge_all = actor._forge_proc_mesh, actor
        leader._forge_pids, leader._forge_named = actor._forge_pids, actor._forge_named
        leader._forge_lost = actor._forge_lost
        await result(leader.lead.call(actor.slice(procs=slice(1, cls.procs))))
        return leader

    @concurrent_endpoint
    async def lead(self, followers: Any) -> None:
        """Learn, as the first process, of the others."""
        self.followers = Followers(followers, self.died)

    async def with_followers(self, own: Awaitable[T], endpoint: str, *args: Any) -> T:
        """Do `own` here and `endpoint` in the other processes, if there are any; returns what `own` does."""
        done: T = await (own if self.followers is None else self.followers.beside(own, endpoint, *args))
        return done


def file_store(path: Path, size: int) -> Any:
    """The store through which `size` processes of one machine find each other: a file, which the last one removes."""
    import torch.distributed as dist

    return dist.FileStore(str(path), size)  # type: ignore[attr-defined]


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
    close_complete_groups()
    backend = "nccl" if with_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)


def _use_network(host: str) -> None:
    """Let ranks talk over the network through which this machine reaches `host`, and listen on no other."""
    import psutil

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))  # sends nothing
        own = ipaddress.ip_address(way.getsockname()[0])
    if own.is_loopback:
        os.environ.setdefault(GLOO_NETWORK, LOOPBACK)  # NCCL has better than that
        return
    for name, addresses in psutil.net_if_addrs().items():
        if str(own) in [each.address for each in addresses]:
            os.environ.setdefault(GLOO_NETWORK, name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def leave() -> None:
    """Undo `join`."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
