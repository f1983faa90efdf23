"""`ForgeActor`: a Monarch actor that knows how it wants to be spawned."""

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

from trainers.actors.processes import (
    Ground,
    end_of,
    name_processes,
    start_processes,
    stop_processes,
    survive_deaths,
)
from trainers.actors.remote import ActorDiedError, result, sendable
from trainers.actors.service import Service, ServiceOptions
from trainers.actors.spare import Spare

__all__ = ["ForgeActor", "concurrent_endpoint", "endpoint", "get_or_spawn_controller", "own_rank"]

# Libraries whose start-up chatter would otherwise appear in every run's log.
QUIET = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
WHY_S = 0.6
"""How long Monarch may take to say why a process ended: it looks every half second."""


@contextmanager
def _sending_errors() -> Iterator[None]:
    """What is raised inside reaches the caller, whatever it is made of."""
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
    """The number of this process among those that the endpoint under way was called on."""
    return int(current_rank().rank)


class ForgeActor(Actor):  # type: ignore[misc]
    """A Monarch actor with its placement as class attributes.

    The constructor takes data only; what is heavy or can fail belongs in `setup`, whose errors reach the caller.

        trainer = await TitanTrainer.options(procs=2, with_gpus=True).as_actor(config)
        ...
        await TitanTrainer.shutdown(trainer)

    Or several of it, one taking the place of another that dies (`trainers.actors.service`):

        counters = await Counter.options(num_replicas=2).as_service(0)
        await counters.add.route(1)
        await counters.stop()

    Attributes:
        procs: processes of one replica.
        ground: other hosts that they are spread over; None: this one.
        with_gpus: whether each process needs a GPU.
        num_replicas: of a service.
        mesh_name: what the processes are called; None: as the class.
        environment: variables of the processes.
        repeatable: endpoints whose calls may be made again elsewhere when their replica dies. Such a call may be
            carried out twice, so name only those that change nothing or may change it twice.
        service: how a service treats its replicas.
        spare: processes of this machine that a replica takes which is started again; its imports are done there.
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
        """A configured copy of this class; the class itself is left as it is."""
        chosen = {
            "procs": procs,
            "with_gpus": with_gpus,
            "num_replicas": num_replicas,
            "mesh_name": mesh_name,
            "environment": environment,
            "service": service,
            "spare": spare,
            "ground": ground,
        }
        attributes = {name: value for name, value in chosen.items() if value is not None}
        # `actor_class` keeps the importable class: a class made on the fly can't be found by a new process.
        return type(cls.__name__, (cls,), {**attributes, "actor_class": cls._actor_class()})

    @classmethod
    def _actor_class(cls) -> type[ForgeActor]:
        chosen: type[ForgeActor] = cls.__dict__.get("actor_class", cls)
        return chosen

    @classmethod
    async def launch(cls, *args: Any, **kwargs: Any) -> Any:
        """Start the processes of one replica and spawn the actor in them (not yet set up)."""
        name = cls.mesh_name or cls.__name__.lower()
        environment = {**QUIET, **cls.environment}
        mesh = None if cls.spare is None else await cls.spare.take(environment)
        mesh = mesh or await start_processes(cls.procs, name, environment, cls.ground)
        try:
            actor = mesh.spawn(name, cls._actor_class(), *args, **kwargs)
            if cls.ground is not None:  # on however many hosts, ranks are numbered through
                actor = actor.flatten("procs")
            actor._forge_proc_mesh, actor._forge_all = mesh, actor
            pids = [pid for _, pid in (await result(actor.process_id.call())).items()]
            actor._forge_pids = [] if cls.ground is not None else pids  # those that mean something here
            actor._forge_named = name_processes(pids, cls.ground)
            actor._forge_lost = [] if cls.ground is None else cls.ground.lost
        except BaseException:  # cancelled too: no process may be left
            await stop_processes(mesh)
            raise
        return actor

    @classmethod
    def prepare_spare(cls) -> None:
        """See to it that the next replica finds processes that are prepared for it, if it is to have any."""
        if cls.spare is not None:
            cls.spare.prepare(cls.procs, cls.mesh_name or cls.__name__.lower(), {**QUIET, **cls.environment})

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> Any:
        """Launch one replica and set it up; a failing `setup` stops its processes and is raised here."""
        actor = await cls.launch(*args, **kwargs)
        try:
            await result(actor.setup.call())
        except BaseException:  # cancelled too: no process may be left
            await cls.shutdown(actor)
            raise
        return actor

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Service:
        """Launch `num_replicas` replicas and set them up; a failing `setup` stops all of them and is raised here."""
        survive_deaths()
        service = Service(cls, *args, **kwargs)
        await service.start()
        return service

    @classmethod
    async def shutdown(cls, actor: Any, *, dead: bool = False) -> None:
        """Stop an actor's processes; those of a `dead` one are not asked first."""
        await stop_processes(actor._forge_proc_mesh, actor._forge_pids, dead=dead)

    @classmethod
    def endpoints(cls) -> list[str]:
        """The names of its endpoints."""
        kind = type(ForgeActor.setup)
        return [name for name in dir(cls) if isinstance(getattr(cls, name), kind)]

    @classmethod
    def watch(cls, actor: Any) -> asyncio.Future[None]:
        """Ends with `ActorDiedError` when any process of the actor dies, hangs, or loses its host.

        That is one call that never returns, the only thing that Monarch tells of every kind of death. It may take
        seconds; of processes on this machine the kernel tells at once, and of the loss of a host the connection to its
        worker.
        """
        telling = result(actor._forge_all.ended.call())
        return asyncio.ensure_future(_death(telling, actor._forge_pids, actor._forge_lost))

    @concurrent_endpoint
    async def ended(self) -> None:
        """Returns when the actor is of no more use, which it is as long as its process lives; override it."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def process_id(self) -> int:
        """Of the process that runs it."""
        return os.getpid()

    @endpoint
    async def setup(self) -> None:
        """Heavy start-up; override it."""


async def _death(telling: Awaitable[None], pids: Sequence[int], lost: Sequence[asyncio.Future[None]]) -> None:
    """Raise how an actor ended: what `telling` raises, or that one of its processes is gone, or of its hosts."""
    told = asyncio.ensure_future(telling)
    ends = [asyncio.ensure_future(end_of(pid)) for pid in pids]
    try:
        await asyncio.wait([told, *ends, *lost], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([told], timeout=WHY_S)
        if told.done():
            return told.result()
        raise ActorDiedError("its host is lost" if any(host.done() for host in lost) else "its process has ended")
    finally:
        for task in (told, *ends):
            task.cancel()
        await asyncio.gather(told, *ends, return_exceptions=True)
