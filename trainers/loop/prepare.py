"""Find or build a recipe's model, warm it up unless that is cached, and start all actors."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from forge_env.config.recipe import RunConfig
from forge_env.environment.base import Environment
from forge_env.errors import UsageError
from forge_env.files import written_whole
from forge_env.machine import cache_dir
from forge_env.run import Run
from forge_env.run.preflight import check_memory
from trainers.buffer.local import LocalReplayBuffer
from trainers.generator.pool import GeneratorPool
from trainers.loop.checkpoints import Checkpoints
from trainers.loop.checks import check_checkpoint, check_files, check_precision, check_tools, check_vocabulary, warms_up
from trainers.loop.stack import Stack
from trainers.loop.trainer import TrainerHandle
from trainers.loop.warmup import cache_key, warm_up
from trainers.model.adapter import targets
from trainers.model.folder import TINY, check_folder, local_folder, read_hf_config, weight_files
from trainers.model.text_part import fetched
from trainers.rollout.rollouts import Rollouts
from trainers.rollout.types import Links, Preparation


class Actors(NamedTuple):
    """The actors of a run, as the loop calls them."""

    trainer: TrainerHandle
    generators: GeneratorPool
    buffer: LocalReplayBuffer[Any]
    rollouts: Rollouts


async def find_model(run: Run) -> Path | None:
    """Return the checkpoint folder of `model.path`, downloading it if necessary; None if the run builds the model."""
    path = run.config.model.path
    if path == TINY:
        return None
    if (local := local_folder(path)) is not None:
        return local
    folder = await asyncio.to_thread(fetched, path)
    await asyncio.to_thread(check_checkpoint, folder, run.config.model)
    check_precision(run.config, folder)
    await asyncio.to_thread(check_tools, run.config, folder)
    if run.config.lora is not None:
        targets(run.config.lora, read_hf_config(folder))
    if run.config.job.kind == "local":
        check_memory(run.config)  # the model's shape may have been unknown before
    return folder


async def start_actors(
    run: Run, stack: Stack, environment: Environment, found: Path | None, preparation: type[Preparation]
) -> Actors:
    """Start all actors on the recipe's model, which is first built and warmed up if necessary.

    Actors that don't depend on each other start concurrently: buffer, workers, the generators' imports, trainer.
    """
    resumed = resumed_model(run)
    warm = None if resumed else _warm_folder(run, environment, found)
    cached = _cached(run, warm)
    start = resumed or cached or (found and await stack.staged(found))
    if start is None:
        start = await asyncio.to_thread(build_tiny, run, environment)
    fresh = warm is None and not weight_files(start)
    serving = run.folder.root / "model" if fresh else warm or start
    generators = stack.generators(serving)
    run.stage("trainer", "trainer and generators are starting")
    async with asyncio.TaskGroup() as group:
        buffer = group.create_task(stack.start_buffer())
        rollouts = group.create_task(_start_rollouts(run, stack, environment, start, preparation))
        # vLLM takes seconds to import: do it while the trainer warms up the model.
        group.create_task(generators.start())
        if serving == start:
            generators.model_ready.set()
        trainer = await stack.start_trainer(start, adapters=serving == start)
        if fresh:
            await trainer.save_model(str(serving))  # the other actors need the weights that it initialized
        elif serving != start:
            run.stage("warm-up", "supervised fine-tuning on demonstrations")
            with written_whole(serving, weight_files) as staging:  # keep a model that another run saved first and reads
                await warm_up(run, environment, trainer, staging)
            run.stage("generator", "loading the warmed-up model")
        trainer.folder = serving
        if serving != start and run.config.lora is not None:  # adapters are added to the warmed-up model
            await stack.restart("trainer")
        generators.model_ready.set()
    other = await _other_reference(run.config, start)
    reference = trainer.reference = await stack.start_reference(
        await stack.staged(other) if other else serving, trainer
    )
    started_rollouts = rollouts.result()
    await started_rollouts.connect(Links(generators.members(), buffer.result(), reference and reference.actor))
    generators.follow(started_rollouts.follow)
    return Actors(trainer, generators, buffer.result(), started_rollouts)


async def _start_rollouts(
    run: Run, stack: Stack, environment: Environment, model: Path, preparation: type[Preparation]
) -> Rollouts:
    workers = await stack.start_workers(run.folder.root, model, preparation)
    rollouts = Rollouts(run, environment, workers)
    await rollouts.look()
    run.summary["engine"] = rollouts.engine
    run.note(f"Sandbox engine: {rollouts.engine}")
    await workers.check_prompts()
    return rollouts


async def _other_reference(config: RunConfig, own: Path) -> Path | None:
    """Return the folder of `grpo.reference.path` after checking that its vocabulary equals that of `own`."""
    name = config.grpo.reference.path
    if name is None:
        return None
    folder = local_folder(name)
    if folder is None:
        folder = await asyncio.to_thread(fetched, name)
    await asyncio.to_thread(check_files, folder, config.model.max_length)
    check_vocabulary(own, folder)
    return folder


def resumed_model(run: Run) -> Path | None:
    """Return the model of the checkpoint to resume from; None if the model from before RL is needed too."""
    if not run.resume or run.config.grpo.reference.source == "initial" or run.config.lora is not None:
        return None
    return Checkpoints(run).model()


def _cached(run: Run, warm: Path | None) -> Path | None:
    """Return the cached warmed-up model if it exists and is valid, else None."""
    if warm is None or not weight_files(warm):
        return None
    try:
        check_folder(warm, run.config.model.max_length)
    except UsageError as error:
        run.warn(f"the warmed-up model in the cache is being rebuilt: {error.message}")
        shutil.rmtree(warm)
        return None
    run.note(f"Warmed-up model from the cache: {warm}")
    return warm


def build_tiny(run: Run, environment: Environment) -> Path:
    """Return the folder of the recipe's small model, without weights; it is created if missing."""
    config = run.config
    folder = cache_dir(config.model.cache_dir) / "models" / f"tiny-{cache_key(config, environment, warm=False)}"
    if not (folder / "config.json").is_file():
        from trainers.model.tiny import build_tiny_folder

        folder.parent.mkdir(parents=True, exist_ok=True)
        build_tiny_folder(config.model, environment, config.seed, folder)
    return folder


def _warm_folder(run: Run, environment: Environment, found: Path | None) -> Path | None:
    """Return the path of the warmed-up model, which may not exist yet; None if the recipe has no warm-up."""
    config = run.config
    if not warms_up(config):
        return None
    key = cache_key(config, environment, warm=True, found=found)
    return cache_dir(config.model.cache_dir) / "models" / f"warm-{key}"
