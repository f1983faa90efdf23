"""Actors of several processes that form one torch process group, which is initialized before `setup`."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forge_env.errors import InfrastructureError
from trainers.actors.actor import ForgeActor, concurrent_endpoint, endpoint, own_rank
from trainers.actors.gloo import GLOO_NETWORK, LOOPBACK, close_complete_groups
from trainers.actors.remote import ActorDiedError, result
from trainers.actors.sockets import private_folder

T = TypeVar("T")
# Maximum wait for another rank. If a rank dies, Monarch ends the others long before that.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class RankedActor(ForgeActor):
    """A `ForgeActor` whose processes are the ranks of one process group; a single process has no group."""

    meeting_point: Any = None
    rank: int = 0
    """Rank of this process among all of the actor's, even in endpoints that are called on some of them only."""

    @classmethod
    async def launch(cls, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and initialize their process group."""
        actor = await super().launch(*args, **kwargs)
        if cls.procs > 1:
            try:
                host = None if cls.ground is None else cls.ground.address
                address = await result(actor.slice(procs=0).open_meeting_point.call_one(cls.procs, host))
                await result(actor.join.call(address, cls.procs, cls.with_gpus))
            except BaseException:  # cancellation too: no process may be left
                await cls.shutdown(actor)
                raise
        return actor

    @endpoint
    async def open_meeting_point(self, size: int, host: str | None) -> Path | tuple[str, int]:
        """Choose, in the first process, the store through which the processes connect; returns its file or address.

        Args:
            host: address of this host to serve the store at; None: all processes are on this machine and share a file.
        """
        if host is None:
            return Path(tempfile.mkdtemp(prefix="ranks-", dir=private_folder()), "store")
        self.meeting_point = serve_store(host, size)
        return host, self.meeting_point.port

    @endpoint
    async def join(self, address: Path | tuple[str, int], size: int, with_gpus: bool) -> None:
        """Join the process group as one of `size` ranks."""
        import torch.distributed as dist

        self.rank = own_rank()
        if isinstance(address, Path):
            store: Any = dist.FileStore(str(address), size)  # type: ignore[attr-defined]
        else:
            _use_network(address[0])
            store = self.meeting_point or dist.TCPStore(*address, size, wait_for_workers=False)  # type: ignore[attr-defined]
        join(store, self.rank, size, with_gpus=with_gpus)


class Followers:
    """Handle in an actor's first process to its other processes.

    Args:
        actor: the actor, sliced to the other processes.
        died: error to raise when one of them has died, since the whole actor is lost then.
    """

    def __init__(self, actor: Any, died: type[InfrastructureError]) -> None:
        self._actor = actor
        self._died = died

    async def call(self, endpoint: str, *args: Any) -> None:
        """Call an endpoint on all followers."""
        try:
            await result(getattr(self._actor, endpoint).call(*args))
        except ActorDiedError as error:
            raise self._died(f"another process of this actor died: {error}") from error

    async def beside(self, own: Awaitable[Any], endpoint: str, *args: Any) -> Any:
        """Await `own` here while `endpoint` runs on the followers; returns the result of `own`."""
        # the followers first: `own` may block this thread until they take part in a collective
        remote = asyncio.ensure_future(self.call(endpoint, *args))
        try:
            # raises a follower's failure at once; the collective here would wait for it until its timeout
            _, value = await asyncio.gather(remote, own)
        finally:
            remote.cancel()
        return value


class LedActor(RankedActor):
    """A `RankedActor` that is called only at its first process: `launch` returns a handle to that one.

    The first process calls the others, so that they get all calls in one order, even from several callers. An endpoint
    uses `with_followers` for work that all processes do together.
    """

    followers: Followers | None = None
    """Set in the first of several processes."""
    died: ClassVar[type[InfrastructureError]] = InfrastructureError
    """Error raised by the first process when another has died."""

    @classmethod
    async def launch(cls, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and give the first one a handle to the others; returns a handle to the first."""
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
        """Set the handle to the other processes, in the first process."""
        self.followers = Followers(followers, self.died)

    async def with_followers(self, own: Awaitable[T], endpoint: str, *args: Any) -> T:
        """Await `own` here while `endpoint` runs in the other processes, if any; returns the result of `own`."""
        value: T = await (own if self.followers is None else self.followers.beside(own, endpoint, *args))
        return value


def serve_store(host: str, size: int) -> Any:
    """Rendezvous store for `size` processes, served by this process at one address of this machine."""
    import torch.distributed as dist

    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port, descriptor = listening.getsockname()[1], listening.detach()  # the store closes it
    options: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
    return dist.TCPStore(host, port, size, **options)  # type: ignore[attr-defined]


def join(store: Any, rank: int, size: int, *, with_gpus: bool) -> None:
    """Initialize torch's process group, with this process as rank `rank` of `size`."""
    import torch
    import torch.distributed as dist

    if with_gpus:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # raises the cause if torch can't use GPUs
        use_gpu(rank % torch.cuda.device_count())
    close_complete_groups()
    backend = "nccl" if with_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)


def use_gpu(index: int) -> None:
    """Make a GPU the current device of this thread and of the threads of the event loop's default executor.

    Each thread has its current CUDA device, which is the first GPU in a new thread.
    """
    import torch

    torch.cuda.set_device(index)
    threads = ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(index,))
    asyncio.get_running_loop().set_default_executor(threads)


def on_this_gpu() -> Callable[[], None] | None:
    """Return an initializer for threads that are to use this thread's GPU; None if no GPU is in use."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def _use_network(host: str) -> None:
    """Make gloo and NCCL use the network interface through which this machine reaches `host`, and no other."""
    import psutil

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        local = ipaddress.ip_address(probe.getsockname()[0])
    if local.is_loopback:
        os.environ.setdefault(GLOO_NETWORK, LOOPBACK)  # NCCL has faster transports within a machine
        return
    for name, addresses in psutil.net_if_addrs().items():
        if str(local) in [each.address for each in addresses]:
            os.environ.setdefault(GLOO_NETWORK, name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def leave() -> None:
    """Destroy the process group that `join` initialized."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
