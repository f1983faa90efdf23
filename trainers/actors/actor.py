"""`ForgeActor`: a Monarch actor whose class attributes set its processes, GPUs and replicas."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import monarch.actor
from monarch.actor import Actor, current_rank, get_or_spawn_controller

from trainers.actors.processes import Ground, end_of, start_processes, stop_processes, survive_deaths
from trainers.actors.remote import ActorDiedError, Calls, methods_of, result, sendable, serving
from trainers.actors.replicas import ServiceOptions
from trainers.actors.service import Service
from trainers.actors.spare import Spare

__all__ = ["ForgeActor", "Served", "concurrent_endpoint", "endpoint", "get_or_spawn_controller", "own_rank"]

# Silences libraries' start-up messages, which would appear in every run's log.
QUIET = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
WHY_S = 0.6
"""Seconds to wait for Monarch to report why a process ended: it polls every half second."""


@contextmanager
def _sending_errors() -> Iterator[None]:
    """Replace errors raised in the block that can't be sent to the caller."""
    try:
        yield
    except Exception as error:  # boundary of the process
        if (sent := sendable(error)) is error:
            raise
        raise sent from error


def _answering(method: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(method):
        return _sending_errors()(method)

    @functools.wraps(method)
    async def answer(*args: Any, **kwargs: Any) -> Any:
        with _sending_errors():
            return await method(*args, **kwargs)

    return answer


def endpoint(method: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Monarch's decorator of the same name; an error that can't be sent arrives as a `RemoteError`."""
    if method is None:
        return functools.partial(endpoint, **options)
    return monarch.actor.endpoint(_answering(method), **options)


def concurrent_endpoint(method: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Monarch's decorator of the same name; errors as with `endpoint`."""
    if method is None:
        return functools.partial(concurrent_endpoint, **options)
    return monarch.actor.concurrent_endpoint(_answering(method), **options)


def own_rank() -> int:
    """Rank of this process among those that the current endpoint was called on."""
    return int(current_rank().rank)


class ForgeActor(Actor):  # type: ignore[misc]
    """A Monarch actor with its placement as class attributes.

    The constructor only takes data. Put slow or fallible initialization into `setup`, whose errors reach the caller.

        trainer = await TitanTrainer.options(procs=2, with_gpus=True).as_actor(config)
        ...
        await TitanTrainer.shutdown(trainer)

    Or as a service of several replicas, which are restarted when they die (`trainers.actors.service`):

        counters = await Counter.options(num_replicas=2).as_service(0)
        await counters.add.route(1)
        await counters.stop()

    Attributes:
        procs: number of processes of one replica.
        ground: other hosts that the processes are spread over; None: this host.
        with_gpus: whether each process needs a GPU.
        num_replicas: number of replicas of a service.
        mesh_name: name of the processes; None: the class's name in lower case.
        environment: environment variables of the processes.
        repeatable: endpoints whose calls may be repeated on another replica when theirs dies. Such a call may be
            carried out twice, so list only endpoints that are read-only or harmless to run twice.
        service: limits of a service: concurrency, queue, repeats and restarts.
        spare: pre-warmed processes on this machine for replicas that are restarted.
    """

    procs: ClassVar[int] = 1
    ground: ClassVar[Ground | None] = None
    with_gpus: ClassVar[bool] = False
    num_replicas: ClassVar[int] = 1
    mesh_name: ClassVar[str | None] = None
    environment: ClassVar[Mapping[str, str]] = {}
    repeatable: ClassVar[frozenset[str]] = frozenset()
    service: ClassVar[ServiceOptions] = ServiceOptions()
    spare: ClassVar[Spare | None] = None

    @classmethod
    def options(
        cls,
        *,
        procs: int | None = None,
        with_gpus: bool | None = None,
        num_replicas: int | None = None,
        mesh_name: str | None = None,
        environment: Mapping[str, str] | None = None,
        service: ServiceOptions | None = None,
        spare: Spare | None = None,
        ground: Ground | None = None,
    ) -> type[Self]:
        """Return a configured subclass; this class is not changed."""
        attributes = {name: value for name, value in locals().items() if name != "cls" and value is not None}
        # `actor_class` holds the importable class: new processes can't import a class created at run time.
        return type(cls.__name__, (cls,), {**attributes, "actor_class": cls._actor_class()})

    @classmethod
    def _actor_class(cls) -> type[ForgeActor]:
        chosen: type[ForgeActor] = cls.__dict__.get("actor_class", cls)
        return chosen

    @classmethod
    async def launch(cls, *args: Any, **kwargs: Any) -> Any:
        """Start the processes of one replica and spawn the actor in them, without setting it up."""
        name = cls.mesh_name or cls.__name__.lower()
        environment = {**QUIET, **cls.environment}
        mesh = None if cls.spare is None else await cls.spare.take(environment)
        mesh = mesh or await start_processes(cls.procs, name, environment, cls.ground)
        try:
            actor = mesh.spawn(name, cls._actor_class(), *args, **kwargs)
            if cls.ground is not None:  # ranks are numbered consecutively over all hosts
                actor = actor.flatten("procs")
            actor._forge_proc_mesh, actor._forge_all = mesh, actor
            pids = [pid for _, pid in (await result(actor.process_id.call())).items()]
            actor._forge_named = f"process {', '.join(map(str, pids))}"
            actor._forge_pids, actor._forge_lost = pids, []
            if cls.ground is not None:
                actor._forge_named += f" on host {cls.ground.name}"
                actor._forge_pids, actor._forge_lost = [], cls.ground.lost  # ids are only valid on this host
        except BaseException:  # cancellation too: no process may be left
            await stop_processes(mesh)
            raise
        return actor

    @classmethod
    def prepare_spare(cls) -> None:
        """Start preparing spare processes for the next restart of a replica, if the class has a `Spare`."""
        if cls.spare is not None:
            cls.spare.prepare(cls.procs, cls.mesh_name or cls.__name__.lower(), {**QUIET, **cls.environment})

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> Any:
        """Launch one replica and set it up; if `setup` fails, its processes are stopped and its error is raised."""
        actor = await cls.launch(*args, **kwargs)
        try:
            await result(actor.setup.call())
        except BaseException:  # cancellation too: no process may be left
            await cls.shutdown(actor)
            raise
        return actor

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Service:
        """Launch `num_replicas` replicas and set them up; if a `setup` fails, all are stopped and it is raised."""
        survive_deaths()
        service = Service(cls, *args, **kwargs)
        await service.start()
        return service

    @classmethod
    async def shutdown(cls, actor: Any, *, dead: bool = False) -> None:
        """Stop an actor's processes; those of a `dead` one are killed at once."""
        await stop_processes(actor._forge_proc_mesh, actor._forge_pids, dead=dead)

    @classmethod
    def endpoints(cls) -> list[str]:
        """Return the names of the actor's endpoints."""
        kind = type(ForgeActor.setup)
        return [name for name in dir(cls) if isinstance(getattr(cls, name), kind)]

    @classmethod
    def watch(cls, actor: Any) -> asyncio.Future[None]:
        """Return a future that fails with `ActorDiedError` when a process of the actor dies, hangs, or loses its host.

        Through Monarch, only a call that never returns fails on every kind of death. That may take seconds, so the
        future also waits for the kernel's report of a process's end on this machine, and for the loss of the connection
        to a host's worker.
        """
        telling = result(actor._forge_all.ended.call())
        return asyncio.ensure_future(_death(telling, actor._forge_pids, actor._forge_lost))

    @concurrent_endpoint
    async def ended(self) -> None:
        """Return when the actor can no longer be used; override it. By default it never returns."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def process_id(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()

    @endpoint
    async def setup(self) -> None:
        """Slow or fallible initialization; override it."""


class Served(ForgeActor):
    """Base class of actors that serve an object: its methods are their endpoints (`trainers.actors.remote`).

    Calls run concurrently. Each takes an argument `call`, an identifier for `withdraw`. `setup` has to set `served`.

    Attributes:
        served: the object.
        calls: calls in progress.
    """

    served: Any

    def __init_subclass__(cls, interface: type | None = None) -> None:
        if interface is not None:
            for name in methods_of(interface):
                if name not in vars(cls):
                    setattr(cls, name, concurrent_endpoint(serving(name)))

    def __init__(self) -> None:
        self.calls = Calls()

    @concurrent_endpoint
    async def withdraw(self, call: str) -> None:
        """Cancel a call whose caller no longer waits for it."""
        self.calls.withdraw(call)


async def _death(telling: Awaitable[None], pids: Sequence[int], lost: Sequence[asyncio.Future[None]]) -> None:
    """Wait for an actor's end and raise why: the error of `telling`, an ended process or a lost host."""
    report = asyncio.ensure_future(telling)
    ends = [asyncio.ensure_future(end_of(pid)) for pid in pids]
    try:
        await asyncio.wait([report, *ends, *lost], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([report], timeout=WHY_S)
        if report.done():
            return report.result()
        raise ActorDiedError("its host is lost" if any(host.done() for host in lost) else "its process has ended")
    finally:
        for task in (report, *ends):
            task.cancel()
        await asyncio.gather(report, *ends, return_exceptions=True)
