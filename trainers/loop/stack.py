"""The actors of a run, as plain objects: the loop calls methods and knows nothing of meshes and endpoints."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.config.recipe import RunConfig
from trainers.actors.placement import Placement
from trainers.actors.remote import result
from trainers.buffer.types import BufferSettings
from trainers.generator.arguments import engine_arguments, process_environment
from trainers.generator.pool import GeneratorPool
from trainers.loop.reference import Reference
from trainers.loop.trainer import TrainerHandle
from trainers.rollout.local import WorkerSettings
from trainers.rollout.types import Preparation

if TYPE_CHECKING:
    from trainers.buffer.actor import RemoteReplayBuffer
    from trainers.rollout.crew import Crew

logger = logging.getLogger(__name__)

# Settings that torchstore, Monarch and torch read once, when they start, in this process and in its children.
PROCESS_ENVIRONMENT = {
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": str(64 * 1024**3),
    "HYPERACTOR_MESH_ENABLE_LOG_FORWARDING": "false",
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",  # how soon a death is noticed: 10 s if not set
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "10s",  # and a process that does not answer: 30 s if not set
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "10s",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def prepare_controller() -> None:
    """Set what libraries read at import; call it before any of them is imported."""
    for name, value in PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class Stack:
    """Weight store, trainer and generators of one run; `async with` starts nothing but guarantees the end."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._trainers: list[Any] = []
        self._generators: list[Any] = []
        self._buffers: list[Any] = []
        self._workers: list[Crew] = []
        self._store: Any = None
        self._placement = Placement()

    async def __aenter__(self) -> Stack:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from trainers.actors.faults import expect_ends

        if error is None:  # else what ended the run may yet be told
            expect_ends()
        try:
            await self.close()
        except Exception:  # whatever fails here is a consequence: it must not hide what ended the run
            if error is None:
                raise
            logger.exception("while ending the actors")

    async def open_store(self) -> None:
        """Start the weight store."""
        from trainers.weights.store import WeightStore

        self._store = WeightStore()
        await self._store.open()

    async def start_trainer(self, folder: Path) -> TrainerHandle:
        """Start the trainer on a checkpoint folder."""
        from trainers.titan.trainer import TitanTrainer

        config = self._config
        section = config.trainer
        actor = await self._placed(TitanTrainer, section, "trainer", section.procs).launch(
            str(folder),
            max_length=config.model.max_length,
            threads=section.threads,
            with_gpus=section.with_gpus,
            seed=config.seed,
            dtype=config.model.dtype,
            parallelism=section.parallelism,
            activation_checkpoint=section.activation_checkpoint,
            compile=section.compile,
        )
        self._trainers.append(actor)
        await result(actor.setup.call())
        return TrainerHandle(actor, folder)

    async def start_reference(self, folder: Path) -> Reference | None:
        """Start the reference model on a checkpoint folder; None: the recipe has none."""
        config = self._config
        section = config.grpo.reference
        if section.source == "none":
            return None
        from trainers.titan.reference import ReferenceModel

        actor = await self._placed(ReferenceModel, section, "reference", 1).launch(
            str(folder),
            max_length=config.model.max_length,
            microbatch_tokens=config.trainer.microbatch_tokens,
            temperature=config.grpo.temperature,
            threads=config.trainer.threads,
            with_gpus=section.with_gpus,
            dtype=config.model.dtype,
        )
        self._trainers.append(actor)
        await result(actor.setup.call())
        return Reference(actor, section)

    async def start_buffer(self) -> RemoteReplayBuffer[Any]:
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
        actor = await ReplayBuffer.options(mesh_name="buffer").as_actor(settings)
        self._buffers.append(actor)
        return RemoteReplayBuffer(actor)

    async def start_workers(self, run_folder: Path, model: Path, preparation: type[Preparation]) -> Crew:
        """Start the rollout workers, with the tokenizer of a checkpoint folder."""
        from trainers.rollout.crew import Crew

        config = self._config
        numbers = range(config.rollouts.workers)
        crew = Crew([WorkerSettings(number, config, run_folder, model, preparation) for number in numbers])
        self._workers.append(crew)
        await crew.start()
        return crew

    async def launch_generators(self, folder: Path) -> GeneratorPool:
        """Start the generators' processes; `preload` and `setup` are the caller's to time."""
        from trainers.generator.generator import Generator

        config = self._config
        section = config.generator
        engine_args = engine_arguments(config, folder)
        process: dict[str, Any] = section.model_dump(include={"with_gpus", "threads", "kv_cache_gb"})
        for replica in range(section.num_replicas):
            environment = process_environment(**process)
            actor_class = self._placed(Generator, section, f"generator{replica}", section.procs, **environment)
            seeded = {**engine_args, "seed": config.seed * section.num_replicas + replica}
            self._generators.append(await actor_class.launch(seeded, {}, process, section.recompute_on_update))
        return GeneratorPool(self._generators, section.max_num_seqs)

    def _placed(self, actor_class: Any, section: Any, name: str, procs: int, **environment: str) -> Any:
        """The class with its processes, on GPUs of their own where its section of the recipe says so."""
        environment |= self._placement.take(procs * section.with_gpus)
        return actor_class.options(procs=procs, with_gpus=section.with_gpus, mesh_name=name, environment=environment)

    async def close(self) -> None:
        """End every process, those first that ask others: nothing may be left that waits for another."""
        from trainers.actors.actor import ForgeActor

        workers, self._workers = self._workers, []
        await asyncio.gather(*(crew.stop() for crew in workers), return_exceptions=True)
        actors = [*self._generators, *self._trainers, *self._buffers]
        self._generators, self._trainers, self._buffers = [], [], []
        await asyncio.gather(*(ForgeActor.shutdown(actor) for actor in actors), return_exceptions=True)
        if self._store is not None:
            store, self._store = self._store, None
            await store.close()
        self._placement.close()
