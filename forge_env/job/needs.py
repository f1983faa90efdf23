"""Requirements of a run: its GPUs, and an estimate of its memory."""

from __future__ import annotations

from forge_env import machine
from forge_env.config.finding import checkpoint_folder
from forge_env.config.recipe import RunConfig

PROCESS_GB = 1.0
"""Resident memory of a process that has imported torch and vLLM or TorchTitan, in GiB."""
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


def model_size_gb(config: RunConfig) -> float:
    """Return the checkpoint size in GiB: the files of a local folder, 0 (unknown) for a hub name, small for `tiny`."""
    if config.model.path == "tiny":
        shape = config.model.tiny
        attention = shape.dim * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
        parameters = shape.vocab_size * shape.dim + shape.layers * (attention + 3 * shape.dim * shape.hidden_dim)
        return parameters * 4 / machine.GIB
    folder = checkpoint_folder(config.model.path)
    if folder is None:
        return 0.0
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / machine.GIB


def trained_size_gb(config: RunConfig) -> float:
    """Return the size of the trained weights in GiB: the checkpoint, or 0 for adapters, which are negligible."""
    return 0.0 if config.lora is not None else model_size_gb(config)


def needed_memory(config: RunConfig) -> dict[str, tuple[int, float]]:
    """Estimate the host memory that a run takes, by role: number of processes, and GiB of each.

    A CPU generator holds weights and key-value cache, a CPU trainer weights, gradients and two optimizer moments; on
    GPUs both are in device memory. In addition, the trainer's processes hold two published versions of the weights, and
    a copy of weights and moments while a checkpoint is written. With adapters, gradients, moments and copies cover the
    adapters only.
    """
    size = model_size_gb(config)
    trained = trained_size_gb(config)
    generator = PROCESS_GB + (size if config.generator.with_gpus else size + config.generator.kv_cache_gb)
    copies = (2 + 3) * trained
    trainer = PROCESS_GB + (copies + (0 if config.trainer.with_gpus else size + 3 * trained)) / config.trainer.procs
    reference = config.grpo.reference.procs
    roles = {
        "controller": (1, CONTROLLER_GB),
        "sandboxes": (int(config.rolls_out), SANDBOXES_GB),
        "generator": (config.generator.num_replicas * config.generator.procs * config.rolls_out, generator),
        "trainer": (config.trainer.procs, trainer),
        "rollout worker": (config.rollouts.workers * config.rolls_out, WORKER_GB),
        "left free": (1, config.watchdog.free_memory_gb),
        "reference": (config.has_reference * reference, PROCESS_GB + size / reference),
    }
    return {role: (count, each) for role, (count, each) in roles.items() if count}


def needed_memory_gb(config: RunConfig) -> float:
    """Return the sum of `needed_memory` in GiB: about 5 for the default recipe on a CPU."""
    return sum(count * each for count, each in needed_memory(config).values())
