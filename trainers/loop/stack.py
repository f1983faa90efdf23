"""The actors of a run, as plain objects: the loop calls methods and knows nothing of meshes and endpoints."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from forge_env.config.models import OptimizerSection, RunConfig
from forge_env.errors import GeneratorError
from trainers.generator.types import Completion, SamplingOptions

logger = logging.getLogger(__name__)

# Settings that torchstore, Monarch and torch read once, when they start, in this process and in its children.
PROCESS_ENVIRONMENT = {
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": str(64 * 1024**3),
    "HYPERACTOR_MESH_ENABLE_LOG_FORWARDING": "false",
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


async def _call(call: Awaitable[Any]) -> Any:
    from trainers.actors.actor import result

    return await result(call)


class TrainerHandle:
    """The trainer's endpoints as methods."""

    def __init__(self, actor: Any, folder: Path) -> None:
        self._actor = actor
        self.folder = folder

    async def configure(self, optimizer: OptimizerSection, **options: Any) -> None:
        """Begin a phase of training (see `TitanTrainer.configure`)."""
        await _call(self._actor.configure.call(optimizer, **options))

    async def train_step(self, sequences: list[Any]) -> dict[str, float]:
        """Update the weights from one batch."""
        metrics: dict[str, float] = await _call(self._actor.train_step.call_one(sequences))
        return metrics

    async def push_weights(self, version: int) -> dict[str, float]:
        """Publish the weights."""
        metrics: dict[str, float] = await _call(self._actor.push_weights.call_one(version))
        return metrics

    async def save(self, folder: str) -> None:
        """Write weights and training state."""
        await _call(self._actor.save.call(folder))

    async def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        await _call(self._actor.load.call(folder))

    async def save_model(self, folder: str) -> None:
        """Write a Hugging Face folder."""
        await _call(self._actor.save_model.call(folder))

    async def logprobs(self, sequences: list[Any]) -> list[list[float]]:
        """Log-probabilities of target tokens under the current weights."""
        result: list[list[float]] = await _call(self._actor.logprobs.call_one(sequences))
        return result


class GeneratorPool:
    """All generators: a request goes to the one with the fewest in flight, weights go to all."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors
        self._in_flight = [0] * len(actors)
        self._names = itertools.count()

    async def generate(self, prompt_ids: list[int], options: SamplingOptions) -> Completion:
        """One completion; a cancelled call ends the request in its replica too."""
        replica = min(range(len(self._actors)), key=self._in_flight.__getitem__)
        self._in_flight[replica] += 1
        actor, request_id = self._actors[replica], f"pool-{next(self._names)}"
        try:
            values = {name: getattr(options, name) for name in options.__slots__}
            completion: Completion = await _call(actor.generate.call_one(prompt_ids, values, request_id))
        except asyncio.CancelledError:
            actor.abort.broadcast(request_id)
            raise
        except GeneratorError:
            raise
        except Exception as error:  # task boundary: whatever a remote process raised, or Monarch about its end
            raise GeneratorError(f"generator {replica} failed: {type(error).__name__}: {error}") from error
        finally:
            self._in_flight[replica] -= 1
        return completion

    async def setup(self) -> None:
        """Load the model in every replica."""
        await asyncio.gather(*(_call(actor.setup.call()) for actor in self._actors))

    async def preload(self) -> None:
        """Import vLLM in every replica, ahead of `setup`."""
        await asyncio.gather(*(_call(actor.preload.call()) for actor in self._actors))

    async def update_weights(self, version: int) -> dict[str, float]:
        """Swap the weights everywhere; the slowest replica's times."""
        results = await asyncio.gather(*(_call(actor.update_weights.call_one(version)) for actor in self._actors))
        return {name: max(result[name] for result in results) for name in results[0]}

    async def stats(self) -> dict[str, float]:
        """Counters summed over replicas."""
        results = await asyncio.gather(*(_call(actor.get_stats.call_one()) for actor in self._actors))
        names = dict.fromkeys(name for result in results for name in result)
        return {name: sum(result.get(name, 0.0) for result in results) for name in names}

    async def halt(self) -> None:
        """Abort everything in flight."""
        await asyncio.gather(*(_call(actor.halt.call()) for actor in self._actors))


class Stack:
    """Weight store, trainer and generators of one run; `async with` starts nothing but guarantees the end."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._trainers: list[Any] = []
        self._generators: list[Any] = []
        self._store: Any = None

    async def __aenter__(self) -> Stack:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
        actor_class = TitanTrainer.options(procs=section.procs, with_gpus=section.with_gpus, mesh_name="trainer")
        actor = await actor_class.launch(
            str(folder),
            max_length=config.model.max_length,
            threads=section.threads,
            with_gpus=section.with_gpus,
            seed=config.seed,
            dtype=config.model.dtype,
        )
        self._trainers.append(actor)
        await _call(actor.setup.call())
        return TrainerHandle(actor, folder)

    async def launch_generators(self, folder: Path) -> GeneratorPool:
        """Start the generators' processes; `preload` and `setup` are the caller's to time."""
        from trainers.generator.generator import Generator

        config = self._config
        section = config.generator
        engine_args = {
            "model": str(folder),
            "dtype": config.model.dtype,
            "max_model_len": config.model.max_length,
            "max_num_seqs": section.max_num_seqs,
            "gpu_memory_utilization": section.gpu_memory_utilization,
            "tensor_parallel_size": section.procs,
            "enforce_eager": section.enforce_eager,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "use_tqdm_on_load": False,
            "seed": config.seed,
        }
        process = {"with_gpus": section.with_gpus, "threads": section.threads, "kv_cache_gb": section.kv_cache_gb}
        for replica in range(section.num_replicas):
            actor_class = Generator.options(with_gpus=section.with_gpus, mesh_name=f"generator{replica}")
            seeded = {**engine_args, "seed": config.seed * section.num_replicas + replica}
            self._generators.append(await actor_class.launch(seeded, {}, process))
        return GeneratorPool(self._generators)

    async def close(self) -> None:
        """End every process, generators first: nothing may be left that waits for another."""
        from trainers.actors.actor import ForgeActor

        actors = [*self._generators, *self._trainers]
        self._generators, self._trainers = [], []
        await asyncio.gather(*(ForgeActor.shutdown(actor) for actor in actors), return_exceptions=True)
        if self._store is not None:
            store, self._store = self._store, None
            await store.close()
