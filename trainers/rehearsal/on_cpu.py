"""A recipe mapped to this machine: no GPUs, few tokens, and no more processes than it can carry."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_env import machine
from forge_env.config.recipe import PartSection, RunConfig
from forge_env.job.addresses import PLATFORMS
from forge_env.job.needs import needed_memory_gb
from trainers.algorithms.parts import AdvantageEstimator, Weight, make_advantage
from trainers.rollout.types import Group

MOST_STEPS = 1000
"""Training steps of the run, which is interrupted long before."""
ON_GPUS = "this run has no GPUs"
SHORT = "short stages"
RANDOM = "the small model's weights are random, so rewards hardly differ"
HERE = "this machine carries no more processes"
INSIDE = "the run stays on this machine"
PROCESSES_PER_CPU = 6
"""Processes of trainer, generators and reference model that a processor is given at most."""
SPARE_GB = 1.0
"""GiB of memory that are left free besides `watchdog.free_memory_gb`."""
PORTABLE_ARGS = ("max_num_batched_tokens",)
"""Arguments in generator.engine_args that mean the same on a CPU."""


class Signal(AdvantageEstimator):
    """The advantages of a recipe's estimator; alternately 1 and -1 in groups that have none, so that weights change.

    Args:
        name: `grpo.advantage.name` of the recipe.
        options: `grpo.advantage.options` of the recipe.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._estimator = make_advantage(PartSection(name=name, options=options))
        self.state_dict = self._estimator.state_dict  # type: ignore[method-assign]
        self.load_state_dict = self._estimator.load_state_dict  # type: ignore[method-assign]

    def __call__(self, group: Group) -> Sequence[Weight]:
        """Advantages of each episode, turn or token, as the recipe's estimator gives them."""
        weights = self._estimator(group)
        if any(np.any(weight) for weight in weights):
            return weights
        return [1.0 - 2.0 * (member % 2) for member in range(len(weights))]


class Edits:
    """Changes of a recipe, with their reasons.

    Args:
        config: the recipe; it isn't changed itself.
    """

    def __init__(self, config: RunConfig) -> None:
        self._data = config.model_dump()
        self._changes: dict[str, dict[str, tuple[Any, Any]]] = {}

    def get(self, key: str) -> Any:
        """The current value of a dotted key."""
        value = self._data
        for name in key.split("."):
            value = value[name]
        return value

    def set(self, reason: str, **values: Any) -> None:
        """Set keys, with `__` for the dots; without a reason, the changes aren't listed."""
        for name, value in values.items():
            *sections, last = name.split("__")
            inner = self._data
            for section in sections:
                inner = inner[section]
            if inner[last] != value:
                changes = self._changes.setdefault(reason, {})
                first, _ = changes.get(".".join((*sections, last)), (inner[last], None))
                changes[".".join((*sections, last))] = (first, value)
                inner[last] = value

    def at_most(self, reason: str, **values: int) -> None:
        """Lower keys that are above a value."""
        for name, value in values.items():
            self.set(reason, **{name: min(self.get(name.replace("__", ".")), value)})

    def config(self) -> RunConfig:
        """The changed recipe."""
        return RunConfig.model_validate(self._data)

    def lines(self) -> Iterator[str]:
        """Describe the changes, a line for each reason."""
        for reason, changes in self._changes.items():
            keys = (f"{key}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in changes.items())
            if reason:
                yield f"{reason}: {', '.join(keys)}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def on_cpu(edits: Edits, folder: Path, hosts: Sequence[str]) -> None:
    """Change a recipe so that its stack runs on this machine within minutes.

    Args:
        edits: receives the changes.
        folder: folder of the rehearsal.
        hosts: addresses of the workers that play the recipe's hosts; none if it has one host.
    """
    _without_gpus(edits)
    _shorten(edits)
    edits.set("", output_dir=str(folder), name="run", model__cache_dir=str(folder / "cache"))
    edits.set(
        INSIDE,
        logging__tensorboard=False,
        logging__wandb=False,
        logging__loggers=[],
        job__kind="hosts" if hosts else "local",
        job__workers=list(hosts),
        job__address=None,
    )
    _cut_down(edits)


def number_of_hosts(config: RunConfig, least: int) -> int:
    """Number of hosts that a recipe needs, at least `least`."""
    job, placed = config.job, [number + 1 for numbers in config.job.place.values() for number in numbers]
    platform = 2 if job.kind in PLATFORMS else 1
    return max(least, platform, len(job.workers), config.trainer.hosts, config.generator.hosts, *placed)


def _without_gpus(edits: Edits) -> None:
    config = edits.config()
    if config.generator.apart:
        edits.set(ON_GPUS, generator__engine="async_llm")  # as `auto` chooses on GPUs
    arguments = config.generator.engine_args
    if config.generator.with_gpus:
        kept = {name: value for name, value in arguments.items() if name in PORTABLE_ARGS}
        edits.set(ON_GPUS, generator__engine_args=kept)
    edits.set(
        ON_GPUS,
        generator__with_gpus=False,
        generator__gpu_memory_utilization=0.9,
        generator__enforce_eager=False,
        generator__kv_cache_gb=1,
        trainer__with_gpus=False,
        trainer__compile=False,
        grpo__reference__with_gpus=False,
        job__share_gpus=False,
        model__dtype="float32",
    )


def _shorten(edits: Edits) -> None:
    config = edits.config()
    waves = config.grpo.max_off_policy_steps + 1
    edits.at_most(
        SHORT,
        grpo__groups_per_step=max(4, -(-config.rollouts.workers // waves)),
        grpo__max_tokens_per_turn=160,
        generator__max_num_seqs=32,
        evaluation__num_tasks=4,
    )
    if config.method == "sft":
        edits.at_most(SHORT, sft__batch_size=4)
    if config.evaluation.extra_splits:
        edits.at_most(SHORT, evaluation__extra_num_tasks=4)
    if config.evaluation.every:
        edits.set(SHORT, evaluation__every=2)
    if config.warmup is not None:
        edits.at_most(SHORT, warmup__steps=2)
    key = "sft__steps" if config.method == "sft" else "grpo__steps"
    edits.set(SHORT, **{key: MOST_STEPS}, checkpoint__every=2, checkpoint__grace_s=0.0)
    edits.set(
        "a loaded machine is slow",
        grpo__group_timeout_s=max(config.grpo.group_timeout_s, 300.0),
        watchdog__warn_s=60.0,
        watchdog__end_s=550.0,
    )


def with_random_weights(edits: Edits) -> None:
    """Keep groups without a signal, and give them one, so that each step changes the weights."""
    advantage = edits.get("grpo.advantage")
    edits.at_most("random replies have no end", grpo__max_tokens_per_turn=48)
    edits.set(RANDOM, grpo__filter={"name": "all", "options": {}})
    if type(make_advantage(PartSection(**advantage))).cuts is AdvantageEstimator.cuts:
        edits.set(RANDOM, grpo__advantage={"name": f"{__name__}:Signal", "options": advantage})
    if edits.get("lora") is not None:
        edits.at_most("the small model's matrices have 32 rows or more", lora__rank=32)


def _cut_down(edits: Edits) -> None:
    """Lower numbers of processes until this machine carries them, the least informative first."""
    free_gb = machine.free_memory_gb() - SPARE_GB
    most = PROCESSES_PER_CPU * machine.usable_cpus()
    config = edits.config()
    dims = config.trainer.parallelism
    floors = {
        "rollouts.workers": 2,
        "generator.num_replicas": 2,
        "generator.procs": 2,
        "trainer.procs": max(2, dims.tensor_parallel_degree * dims.context_parallel_degree),
        "grpo.reference.procs": 1,
        "generator.spare": False,
        "generator.num_replicas ": 1,
    }
    while _processes(config) > most or needed_memory_gb(config) > free_gb:
        key = next((key.strip() for key, floor in floors.items() if edits.get(key.strip()) > floor), None)
        if key is None:
            return  # the run's own check says what is missing
        _lower(edits, key)
        config = edits.config()


def _processes(config: RunConfig) -> int:
    generators = config.generator.num_replicas * config.generator.procs * config.rolls_out
    return generators + config.trainer.procs + config.grpo.reference.procs * config.has_reference


def _lower(edits: Edits, key: str) -> None:
    """Lower a number of processes to half of it, or its next smaller divisor."""
    number = edits.get(key)
    name = key.replace(".", "__")
    if not key.endswith("procs"):
        edits.set(HERE, **{name: False if number is True else number - 1})
        return
    role = key.removesuffix(".procs")
    lower = next(each for each in range(number - 1, 0, -1) if number % each == 0)
    edits.set(HERE, **{name: lower})
    if role != "grpo.reference":
        edits.set(HERE, **{f"{role}__hosts": math.gcd(lower, edits.get(f"{role}.hosts"))})
    if role == "trainer":
        edits.set(HERE, trainer__parallelism__data_parallel_shard_degree=-1)
