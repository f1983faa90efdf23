"""Requirements of a run: its GPUs, and an estimate of its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.plugins import installed, load_entry

PROCESS_GB = 0.7
"""Memory of a process that has imported torch and vLLM or TorchTitan, in GiB."""
ALLOCATED = 1.2
"""Bytes that torch's allocator takes on a CPU for each byte of the trainer's tensors at their peak.

It doesn't return all that earlier steps freed. This and `PROCESS_GB` were fitted to three measured trainers: a model of
0.9 million parameters, with and without adapters, and one of 135 million with adapters.
"""
WORKER_GB = 0.3
"""Memory of a rollout worker, in GiB: the environment, the tokenizer, and the running episodes."""
CONTROLLER_GB = 0.5
SANDBOXES_GB = 0.5


def gpus_by_role(config: RunConfig) -> dict[str, int]:
    """Return the number of GPUs of each role that uses any."""
    generators = config.generator.num_replicas * config.generator.procs * config.rolls_out
    roles = {
        "generator": generators * config.generator.with_gpus,
        "trainer": config.trainer.procs * config.trainer.with_gpus,
        "grpo.reference": config.grpo.reference.procs * config.grpo.reference.with_gpus,
    }
    return {role: count for role, count in roles.items() if count}


def needed_gpus(config: RunConfig) -> int:
    """Return the GPUs of all roles together; if roles share GPUs, those of the role that wants most."""
    counts = gpus_by_role(config).values()
    return max(counts, default=0) if config.job.share_gpus else sum(counts)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory and disk space for the model, in GiB.

    Attributes:
        weights_gb: all weights in float32.
        published_gb: what is trained, in the generators' precision.
        saved_gb: a checkpoint: what is trained and its two optimizer moments, in float32.
        trainer_gb: main memory of a trainer's process at its peak: weights, gradients, moments and activations.
        generator_gb: main memory of a generator's process: weights, keys and values.
        reference_gb: main memory of a reference model's process.
    """

    weights_gb: float = 0.0
    published_gb: float = 0.0
    saved_gb: float = 0.0
    trainer_gb: float = 0.0
    generator_gb: float = 0.0
    reference_gb: float = 0.0


def model_memory(config: RunConfig) -> ModelMemory:
    """Forecast what the model takes; only keys and values if its shape is unknown, as before a first download."""
    cache_gb = 0.0 if config.generator.with_gpus else config.generator.kv_cache_gb / config.generator.procs
    if (entry := installed("forge_env.forecasts").get("model_memory")) is None:
        return ModelMemory(generator_gb=cache_gb)
    forecast: Callable[[RunConfig], ModelMemory] = load_entry(entry)
    try:
        return forecast(config)
    except UsageError:  # the trainer's own checks report a wrong model or layout
        return ModelMemory(generator_gb=cache_gb)


def needed_memory(config: RunConfig) -> dict[str, tuple[int, float]]:
    """Estimate the main memory that a run takes, by role: number of processes, and GiB of each.

    A CPU generator holds weights, keys and values, a CPU trainer weights, gradients, two optimizer moments and
    activations; on GPUs both are in device memory, and a generator's weights pass through main memory at its start.
    The trainer's processes also hold two published versions of what is trained, and a copy of it and of its moments
    while a checkpoint is written.
    """
    model = model_memory(config)
    trainer, generator, reference = config.trainer, config.generator, config.grpo.reference
    copies = (2 * model.published_gb * config.rolls_out + model.saved_gb) / trainer.procs
    engine = model.weights_gb if generator.with_gpus else model.generator_gb
    roles = {
        "controller": (1, CONTROLLER_GB),
        "sandboxes": (int(config.rolls_out), SANDBOXES_GB),
        "generator": (generator.num_replicas * generator.procs * config.rolls_out, PROCESS_GB + engine),
        "trainer": (trainer.procs, PROCESS_GB + ALLOCATED * model.trainer_gb + copies),
        "rollout worker": (config.rollouts.workers * config.rolls_out, WORKER_GB),
        "left free": (1, config.watchdog.free_memory_gb),
        "reference": (config.has_reference * reference.procs, PROCESS_GB + model.reference_gb),
    }
    return {role: (count, each) for role, (count, each) in roles.items() if count}


def needed_memory_gb(config: RunConfig) -> float:
    """Return the sum of `needed_memory` in GiB: about 5 for the default recipe on a CPU."""
    return sum(count * each for count, each in needed_memory(config).values())
