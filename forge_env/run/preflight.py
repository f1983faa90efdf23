"""Preflight checks: foreseeable failures are reported before anything starts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from forge_env import machine, registry
from forge_env.config.reader import read_as, refuse_redacted
from forge_env.config.recipe import RunConfig
from forge_env.errors import ForgeError, UsageError
from forge_env.job.needs import gpus_by_role, model_memory, needed_gpus, needed_memory, needed_memory_gb
from forge_env.job.survey import survey
from forge_env.plugins import check_registered, installed
from forge_env.redaction import redact_settings
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import check_loggers
from forge_env.run.trainer import load_trainer


class Ready(NamedTuple):
    """The result of the checks for a run that can begin.

    Attributes:
        plan: placement of the actors, a line for each host; empty if the run stays on this machine.
    """

    engine: str
    plan: str = ""


def check(config: RunConfig, folder: RunFolder) -> Ready:
    """Refuse a run that can't work, cheapest checks first.

    Raises:
        ForgeError: with the fix.
    """
    refuse_redacted(config.model_dump(mode="json"))
    check_plugins(config)
    check_packages(config)
    check_loggers(config)
    check_disk(config, folder)
    if config.job.kind == "local":
        check_gpus(config)
        check_memory(config)
        ready = Ready(check_sandbox(config) if config.rolls_out else "none: no episodes are played")
    else:
        ready = check_hosts(config, folder)
    load_trainer(config.method).check(config)
    return ready


def check_hosts(config: RunConfig, folder: RunFolder) -> Ready:
    """Check that the other hosts answer, have the same code and files, and have room for everything."""
    hosts = asyncio.run(survey(config, folder.root))
    assert hosts is not None
    check_least_gpus(sum(len(card.gpus) for card in hosts.cards), "the hosts have")
    engines = {
        hosts.cards[host].engine
        for name, placement in hosts.plan.places.items()
        for host in placement.hosts
        if name.startswith("rollouts")
    }
    return Ready(", ".join(sorted(engines)), str(hosts.plan))


def check_plugins(config: RunConfig) -> None:
    """Check that trainer and loss are registered, and that the environment loads and accepts its options."""
    check_registered("forge_env.trainers", config.method)
    check_registered("forge_env.losses", config.grpo.loss.name)
    environment = config.environment
    cls = registry.environment_class(environment.name)
    registry.make_config(environment.name, cls, environment.options, at="environment.options")


def check_packages(config: RunConfig) -> None:
    """Check that the training stack is installed, if the method is one of ours."""
    entry = installed("forge_env.trainers").get(config.method)
    if entry is None or not entry.value.startswith("trainers."):
        return
    if reason := machine.needs_linux("training"):
        raise ForgeError(reason, fix="train on a Linux machine or in WSL; environments and evaluations also run here")
    if missing := machine.missing_training_packages():
        stack = "gpu" if needed_gpus(config) else "cpu"
        raise ForgeError(
            f"training needs packages that aren't installed: {', '.join(missing)}",
            fix=f"run `make setup STACK={stack}` in a clone of forge-env (docs/install.md)",
        )
    if libraries := machine.missing_libraries():
        raise ForgeError(
            f"vLLM needs libraries that this system lacks: {', '.join(libraries)}",
            fix=f"apt-get install {' '.join(libraries)}",
        )


def check_gpus(config: RunConfig) -> None:
    """Check that this machine has enough GPUs, and that vLLM can run on the CPU if the generator gets no GPU."""
    check_least_gpus(len(machine.gpus()), "this machine has")
    if config.rolls_out and not config.generator.with_gpus and machine.torch_build() in ("cuda", "rocm"):
        raise ForgeError(
            f"the installed vLLM is built for GPUs and can't generate on the CPU{machine.gpus_hidden()}",
            fix="set generator.with_gpus=true, or install the CPU packages: make setup STACK=cpu",
        )
    needed, total = gpus_by_role(config), needed_gpus(config)
    if not needed:
        return
    visible, unclaimed = len(machine.gpus()), len(machine.unclaimed_gpus())
    if unclaimed >= total:
        return
    roles = ", ".join(f"{role} {count}" for role, count in needed.items())
    cpu = " ".join(f"--{role}.with_gpus false" for role in needed)
    smaller = "job.share_gpus=true, " if 0 < unclaimed < total and not config.job.share_gpus else ""
    smaller += "fewer generator.num_replicas, generator.procs or trainer.procs, " if unclaimed >= len(needed) else ""
    if "grpo.reference" in needed and config.grpo.reference.source != "path":
        smaller += "no reference model (grpo.beta=0), "
    others = f", of which other runs have {visible - unclaimed}" if visible > unclaimed else ""
    raise ForgeError(
        f"Insufficient GPU resources: this recipe needs {total} ({roles}), this machine has {visible}{others}"
        f"{machine.gpus_hidden()}",
        fix=f"use {smaller}a bigger machine, or run on the CPU with {cpu}",
    )


def check_least_gpus(found: int, there: str) -> None:
    """Check that there are as many GPUs as MIN_GPUS says, which scripts set for the machines that they ask for."""
    least = os.environ.get("MIN_GPUS", "").strip() or "0"
    if not least.isdigit():
        raise UsageError(f"MIN_GPUS={least!r} is not a number", fix="set it to a number of GPUs, or unset it")
    if found < int(least):
        raise ForgeError(
            f"Insufficient GPU resources: MIN_GPUS requires {least}, {there} {found}",
            fix="use a bigger machine, or set MIN_GPUS lower: a recipe's own needs are checked anyway",
        )


def check_memory(config: RunConfig) -> None:
    """Check that enough memory is free."""
    needed, free = needed_memory_gb(config), machine.free_memory_gb()
    if free >= needed:
        return
    counts = {
        "generator.num_replicas": config.generator.num_replicas,
        "generator.procs": config.generator.procs,
        "trainer.procs": config.trainer.procs,
        "rollouts.workers": config.rollouts.workers,
    }
    many = " or ".join(key for key, count in counts.items() if count > 1)
    fix = (
        f"close other programs, or lower {many}" if many else "close other programs, or use a machine with more memory"
    )
    parts = ", ".join(f"{role} {count} x {each:.1f}" for role, (count, each) in needed_memory(config).items())
    raise ForgeError(
        f"too little memory: the run takes about {needed:.1f} GiB ({parts}), {free:.1f} GiB are free", fix=fix
    )


def needed_disk_gb(config: RunConfig) -> tuple[float, float]:
    """Estimate the disk space of (run folder, cache), GiB."""
    model = model_memory(config)
    checkpoints = (config.checkpoint.keep + config.checkpoint.keep_best + 1) * model.saved_gb
    return 0.3 + checkpoints, 0.2 + (3 if config.warmup else 1) * model.weights_gb


def check_disk(config: RunConfig, folder: RunFolder) -> None:
    """Check that the run folder and the cache are writable and have enough space."""
    for_run, for_cache = needed_disk_gb(config)
    cache = machine.cache_dir(config.model.cache_dir)
    for path, needed, key in ((folder.root, for_run, "output_dir"), (cache, for_cache, "model.cache_dir")):
        parent = machine.existing_parent(path)
        if not parent.is_dir():
            raise ForgeError(f"can't write to {path}: {parent} is not a folder", fix=f"choose another {key}")
        if not _writable(parent):
            raise ForgeError(f"can't write to {path}", fix=f"choose another folder with {key}=PATH")
        if (free := machine.free_disk_gb(path)) < needed:
            raise ForgeError(
                f"the disk of {path} is full: {free:.2f} GiB free, the run takes about {needed:.2f} GiB",
                fix=f"free some space, or choose another folder with {key}=PATH",
            )


def _writable(folder: Path) -> bool:
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_sandbox(config: RunConfig) -> str:
    """Check that a sandbox engine can isolate code here and has the environment's sandboxes; return its name."""
    from forge_env.environment.sandbox_environment import SandboxEnvironment
    from forge_env.sandbox.engines import open_engine

    engine = open_engine(config.sandbox.engine, **config.sandbox.engine_options())
    cls = registry.environment_class(config.environment.name)
    if issubclass(cls, SandboxEnvironment):
        engine.check(cls.sandbox_spec)
    return engine.name


def changed_keys(config: RunConfig, saved: Path) -> list[str]:
    """List the keys in which a resumed run differs from its saved recipe, as `key: old -> new`."""
    try:
        old = read_as(RunConfig, saved)
    except UsageError:  # written by another version: can't be compared
        return []
    before, after = (flat(redact_settings(each.model_dump(mode="json"))) for each in (old, config))
    keys = [key for key in after if key != "name" and before.get(key) != after[key]]
    return [f"{key}: {json.dumps(before.get(key))} -> {json.dumps(after[key])}" for key in keys]


def flat(data: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten nested settings to dotted keys."""
    result: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result
