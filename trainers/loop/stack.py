"""Start, watch, restart and stop the actors of a run, so that the training loop needs no Monarch meshes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import string
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from forge_env.config.recipe import LoRASection, RunConfig
from forge_env.errors import ForgeError, InfrastructureError
from forge_env.machine import SELDOM
from forge_env.run import Run
from trainers.actors.placement import Placement
from trainers.actors.remote import ActorDiedError, result
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings
from trainers.generator.arguments import engine_arguments, process_environment
from trainers.generator.pool import GeneratorPool
from trainers.loop.trainer import BaseReference, Reference, TrainerHandle
from trainers.model.folder import hub_name
from trainers.rollout.local import WorkerSettings
from trainers.rollout.types import Preparation

if TYPE_CHECKING:
    from trainers.actors.hosts import Hosts
    from trainers.rollout.rollouts import Crew

logger = logging.getLogger(__name__)
T = TypeVar("T")
Placed = Callable[[], Awaitable[Any]]
RDMA = "TORCHSTORE_USE_RDMA"
NAMED_S = 2.0
"""Seconds to wait, after a failed call, for the notice of the actor's death that may have caused it."""

# Read by libraries once at import, in this process and its children. Monarch's variables are in `trainers.actors`.
PROCESS_ENVIRONMENT = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def prepare_controller() -> None:
    """Set environment variables of libraries and the actors' garbage collection thresholds; call it before imports."""
    for name, value in PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if RDMA in os.environ:  # documented name; TorchStore reads the other one
        os.environ["TORCHSTORE_RDMA_ENABLED"] = str(int(_asks_for_rdma()))
    gc.set_threshold(*SELDOM)


def _asks_for_rdma() -> bool:
    return os.environ.get(RDMA, "").lower() in ("1", "true")


def tell_of_rdma(run: Run) -> None:
    """Warn if the documented variable requests RDMA and the weights' transport has none."""
    if _asks_for_rdma() and run.config.weights.transport == "shared":
        run.warn(
            f"{RDMA} has no effect: it is for weights in TorchStore (weights.transport=torchstore), and those of this "
            "run go through memory on one host and over TCP between hosts"
        )


class RoleDiedError(ForgeError):
    """An actor without replicas has died."""

    def __init__(self, role: str, why: str) -> None:
        super().__init__(f"the {ROLES[role]} died: {why}", fix="see run.log, then continue with --resume")
        self.role = role


TITAN_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Environment variables of processes that run TorchTitan. Expandable segments keep GPU memory from fragmenting when
microbatches differ in size."""
ROLES = {"trainer": "trainer", "reference": "reference model", "buffer": "replay buffer"}


class Stack:
    """The actors of a run, which are guaranteed to be stopped when `async with` ends.

    They are the trainer, buffer, reference model, rollout workers and generators.

    Generators are restarted by `GeneratorPool`. When another actor dies, `unless_one_dies` cancels its work and raises;
    the caller may then `restart` the actor.

    Args:
        hosts: hosts to start actors on; None: this machine.
    """

    def __init__(self, config: RunConfig, hosts: Hosts | None = None) -> None:
        self._config = config
        self._hosts = hosts
        self._actors: dict[str, Any] = {}
        self._watches: dict[str, asyncio.Future[None]] = {}
        self._clients: dict[str, tuple[Any, Callable[[], Awaitable[Any]]]] = {}
        """Client of an actor and the function that starts the actor again, by role."""
        self._death: asyncio.Future[None] | None = None
        self._pool: GeneratorPool | None = None
        self._crew: Crew | None = None
        self._store_open = False
        self._placement = Placement(shared=config.job.share_gpus)

    async def __aenter__(self) -> Stack:
        from trainers.actors.processes import survive_deaths

        survive_deaths()
        if self._hosts is not None:
            await self._hosts.open()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.close()
        except Exception:  # errors here are consequences: they must not mask the error that ended the run
            if error is None:
                raise
            logger.exception("the actors could not be stopped")

    # --- actor deaths

    async def unless_one_dies(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, and cancel it when an actor dies.

        Raises:
            RoleDiedError: an actor died, even if `work` raised another error because of it. Names one actor; if a
                second one died too, the next call raises for it.
        """
        death = self._death = asyncio.get_running_loop().create_future()
        for role, watch in list(self._watches.items()):
            if watch.done():
                self._ended(role, watch)
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
            if not death.done() and not task.cancelled() and _caused_by_a_death(task.exception()):
                await asyncio.wait([death], timeout=NAMED_S)
            if death.done() and not (task.done() and not task.cancelled() and task.exception() is None):
                death.result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if death.done():
                death.exception()  # mark as retrieved
            death.cancel()

    def _watch(self, role: str, watch: asyncio.Future[None]) -> None:
        """Report the death of the actor of `role` when `watch` ends."""
        self._watches[role] = watch
        watch.add_done_callback(partial(self._ended, role))

    def _ended(self, role: str, watch: asyncio.Future[None]) -> None:
        if watch.cancelled() or self._watches.get(role) is not watch:
            return
        why = watch.exception()
        if self._death is not None and not self._death.done():  # otherwise the next `unless_one_dies` reports it
            del self._watches[role]  # report once; the caller restarts it
            self._death.set_exception(RoleDiedError(role, str(why)))

    async def restart(self, role: str) -> None:
        """Stop the remaining processes of a dead actor and start it again with the same arguments."""
        await self._end(role, dead=True)
        client, start = self._clients[role]
        client.actor = await start()

    async def _end(self, role: str, *, dead: bool = False) -> None:
        from trainers.actors.actor import ForgeActor

        if (watch := self._watches.pop(role, None)) is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if (actor := self._actors.pop(role, None)) is not None:
            await ForgeActor.shutdown(actor, dead=dead)

    async def _start(self, role: str, placed: Placed, *args: Any, **kwargs: Any) -> Any:
        """Place and launch an actor, watch it, and run its setup."""
        try:
            actor_class = await placed()
            actor = self._actors[role] = await actor_class.launch(*args, **kwargs)
        except ActorDiedError as error:
            raise RoleDiedError(role, str(error)) from error
        logger.info("%s: %s", role, actor._forge_named)
        self._watch(role, actor_class.watch(actor))
        await result(actor.setup.call())
        return actor

    # --- actors

    def host_metrics(self) -> dict[str, float]:
        """Load of each host since the last call (`Hosts.metrics`); empty if everything runs on this machine."""
        return {} if self._hosts is None else self._hosts.metrics()

    async def staged(self, model: Path) -> Path:
        """Path of a model's folder that all hosts can read: the folder itself or a copy in the cache."""
        return model if self._hosts is None else await self._hosts.staged(model)

    async def start_trainer(self, folder: Path, *, adapters: bool = True) -> TrainerHandle:
        """Start the trainer on a Hugging Face folder; without `adapters`, it trains all weights until restarted."""
        from trainers.titan.trainer import TitanTrainer

        config = self._config
        section = config.trainer
        gpus = section.procs * section.with_gpus
        placed = self._placed(
            TitanTrainer, "trainer", section.procs, with_gpus=section.with_gpus, gpus=gpus, **TITAN_ENVIRONMENT
        )
        through_store = config.weights.transport == "torchstore"

        async def start(folder: Path, lora: LoRASection | None) -> Any:
            actor = await self._start(
                "trainer",
                placed,
                str(folder),
                max_length=config.model.max_length,
                threads=section.threads,
                with_gpus=section.with_gpus,
                seed=config.seed,
                dtype=config.model.dtype,
                parallelism=section.parallelism,
                activation_checkpoint=section.activation_checkpoint,
                compile=section.compile,
                lora=lora,
                base_name=hub_name(config.model.path),
                transport=config.weights.transport,
            )
            if through_store:
                from trainers.weights.store import open_store

                await open_store(actor._forge_proc_mesh, section.procs)
                self._store_open = True
            return actor

        trainer = TrainerHandle(await start(folder, config.lora if adapters else None), folder, uploads=through_store)
        self._clients["trainer"] = trainer, lambda: start(trainer.folder, config.lora)
        return trainer

    async def start_reference(self, folder: Path, trainer: TrainerHandle) -> Reference | BaseReference | None:
        """Start the reference model on a checkpoint folder, or use the trainer's; None if the recipe has none."""
        config = self._config
        section = config.grpo.reference
        if not config.has_reference:
            return None if section.source == "none" else BaseReference(trainer)
        from trainers.titan.reference import ReferenceModel

        gpus = section.procs * section.with_gpus
        placed = self._placed(
            ReferenceModel, "reference", section.procs, with_gpus=section.with_gpus, gpus=gpus, **TITAN_ENVIRONMENT
        )

        start = partial(
            self._start,
            "reference",
            placed,
            str(folder),
            max_length=config.model.max_length,
            microbatch_tokens=config.trainer.microbatch_tokens,
            share_prefixes=config.trainer.share_prefixes,
            temperature=config.grpo.temperature,
            threads=config.trainer.threads,
            with_gpus=section.with_gpus,
            dtype=config.model.dtype,
        )
        reference = Reference(await start(), section)
        self._clients["reference"] = reference, start
        return reference

    async def start_buffer(self) -> LocalReplayBuffer[Any]:
        """Start the replay buffer."""
        from trainers.buffer.actor import RemoteReplayBuffer, ReplayBuffer

        config = self._config
        settings = BufferSettings(
            per_step=config.grpo.groups_per_step,
            max_off_policy_steps=config.grpo.max_off_policy_steps,
            steps=config.grpo.steps,
            replay=config.grpo.replay,
            seed=config.seed,
        )

        start = partial(self._start, "buffer", self._placed(ReplayBuffer, "buffer"), settings)
        buffer: Any = RemoteReplayBuffer(await start())
        self._clients["buffer"] = buffer, start
        return cast("LocalReplayBuffer[Any]", buffer)

    async def start_workers(self, run_folder: Path, model: Path, preparation: type[Preparation]) -> Crew:
        """Start the rollout workers with the tokenizer of the checkpoint folder `model`."""
        from trainers.rollout.rollouts import Crew
        from trainers.rollout.worker import RolloutWorker

        config = self._config
        numbers = range(config.rollouts.workers)
        settings = [WorkerSettings(number, config, run_folder, model, preparation) for number in numbers]
        crew = Crew(settings, [self._placed(RolloutWorker, each.name) for each in settings])
        self._crew = crew
        await crew.start()
        return crew

    def generators(self, folder: Path) -> GeneratorPool:
        """Create the generators without starting them; set `model_ready` once `folder` contains the model."""
        from trainers.actors.spare import Spare
        from trainers.generator.generator import Generator, import_engine

        config = self._config
        section = config.generator
        engine_args = engine_arguments(config, folder)
        process: dict[str, Any] = section.model_dump(include={"with_gpus", "threads", "kv_cache_gb"})
        environment = process_environment(**process)
        procs = 1 if section.apart else section.procs
        kind = Generator.options(
            procs=procs,
            mesh_name="generator",
            environment=environment,
            spare=Spare(partial(import_engine, **process)) if section.spare and self._hosts is None else None,
        )
        launches = []
        for number in range(section.num_replicas):
            name = f"generator{number}"
            gpus = section.procs * section.with_gpus
            placed = self._placed(kind, name, procs, with_gpus=section.with_gpus, gpus=gpus, **environment)

            async def launch(life: int, placed: Placed = placed, number: int = number) -> Any:
                seed = (config.seed + life) * section.num_replicas + number  # restarts draw different samples
                return await (await placed()).launch(
                    {**engine_args, "seed": seed}, {}, process, section.recompute_on_update, section.apart
                )

            launches.append(launch)
        self._pool = GeneratorPool(launches, kind, section.max_num_seqs)
        return self._pool

    async def start_generators(self, folder: Path) -> GeneratorPool:
        """Start the generators on the model in `folder`."""
        generators = self.generators(folder)
        generators.model_ready.set()
        await generators.start()
        return generators

    def _placed(
        self,
        actor_class: Any,
        name: str,
        procs: int = 1,
        *,
        with_gpus: bool = False,
        gpus: int | None = None,
        **environment: str,
    ) -> Placed:
        """Return a function that, at each start of an actor, chooses its host and returns its configured class.

        Processes with GPUs get them exclusively (shared between roles if `job.share_gpus`), by default one each. On
        this machine, an actor has the same GPUs at each start.
        """
        if self._hosts is None:
            environment |= self._placement.take(procs * with_gpus if gpus is None else gpus, name.rstrip(string.digits))
        else:
            environment = PROCESS_ENVIRONMENT | environment

        async def placed() -> Any:
            ground = None if self._hosts is None else await self._hosts.ground(name)
            return actor_class.options(
                procs=procs, with_gpus=with_gpus, mesh_name=name, environment=environment, ground=ground
            )

        return placed

    async def close(self) -> None:
        """Stop every process, callers before the actors they call, so that none is left waiting for another."""
        if self._crew is not None:
            crew, self._crew = self._crew, None
            await crew.stop()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.stop()
        if self._store_open:
            from trainers.weights.store import close_store

            await close_store()
        await asyncio.gather(*(self._end(role) for role in list(self._actors)), return_exceptions=True)
        self._placement.close()
        if self._hosts is not None:
            await self._hosts.close()


async def unless_stopped(run: Run, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None if `run` is asked to stop first; `work` is then cancelled and awaited."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(run.stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _caused_by_a_death(error: BaseException | None) -> bool:
    """Whether an error may be the consequence of an actor's death that has not been reported yet."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_caused_by_a_death, error.exceptions))
    return isinstance(error, InfrastructureError) or (error is not None and _caused_by_a_death(error.__cause__))
