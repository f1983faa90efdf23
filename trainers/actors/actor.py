"""`ForgeActor`: a Monarch actor that knows how it wants to be spawned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint

from trainers.actors.processes import start_processes

__all__ = ["ForgeActor", "concurrent_endpoint", "endpoint", "own_rank"]

# Libraries whose start-up chatter would otherwise appear in every run's log.
QUIET = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}


def own_rank() -> int:
    """The number of this process among those that the endpoint under way was called on."""
    return int(current_rank().rank)


class ForgeActor(Actor):  # type: ignore[misc]
    """A Monarch actor with its placement as class attributes.

    The constructor takes data only; what is heavy or can fail belongs in `setup`, whose errors reach the caller.

        trainer = await TitanTrainer.options(procs=2, with_gpus=True).as_actor(config)
        await trainer.setup.call()
        ...
        await TitanTrainer.shutdown(trainer)
    """

    procs: ClassVar[int] = 1
    hosts: ClassVar[int | None] = None
    with_gpus: ClassVar[bool] = False
    num_replicas: ClassVar[int] = 1
    mesh_name: ClassVar[str | None] = None
    environment: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def options(
        cls,
        *,
        procs: int | None = None,
        hosts: int | None = None,
        with_gpus: bool | None = None,
        num_replicas: int | None = None,
        mesh_name: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> type[Self]:
        """A configured copy of this class; the class itself is left as it is."""
        chosen = {
            "procs": procs,
            "hosts": hosts,
            "with_gpus": with_gpus,
            "num_replicas": num_replicas,
            "mesh_name": mesh_name,
            "environment": environment,
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
        mesh = await start_processes(cls.procs, name, {**QUIET, **cls.environment})
        actor = mesh.spawn(name, cls._actor_class(), *args, **kwargs)
        actor._forge_proc_mesh = mesh
        return actor

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> Any:
        """Launch one replica and set it up; a failing `setup` stops its processes and is raised here."""
        actor = await cls.launch(*args, **kwargs)
        try:
            await actor.setup.call()
        except BaseException:  # cancelled too: no process may be left
            await cls.shutdown(actor)
            raise
        return actor

    @classmethod
    async def shutdown(cls, actor: Any) -> None:
        """Stop an actor's processes."""
        await actor._forge_proc_mesh.stop()

    @endpoint
    async def setup(self) -> None:
        """Heavy start-up; override it."""
