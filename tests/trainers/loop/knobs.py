"""Another value for every knob of the recipe, what it needs beside it, and where its effect is looked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forge_env.config.reader import section_of
from forge_env.config.recipe import RunConfig, Section

LISTENER = "tests.trainers.loop.dry_run:Listener"
LONG_RUN = {"grpo.steps": 16, "grpo.max_off_policy_steps": 3, "evaluation.every": 0, "generator.max_num_seqs": 4}
"""Enough groups, and few enough at once, for rules that choose among them."""


@dataclass(frozen=True)
class Change:
    """A knob turned.

    Attributes:
        value: another value; `{root}` in it is the test's folder.
        needs: overrides without which the knob has nothing to act on; both runs have them.
        where: names of the observers in `test_knobs.py` that all have to see a difference. `run` sees an actor's knob
            as what the actor is given; the others what it makes of it. Those of several processes and of weights under
            way are `test_titan_ranks.py`'s and `test_stack.py`'s.
        refused: the effect is a refusal that names the knob, before anything is started.
    """

    value: Any
    needs: dict[str, Any] = field(default_factory=dict)
    where: tuple[str, ...] = ("run",)
    refused: bool = False


def leaves(model: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every knob of the recipe as a dotted key, sections left out."""
    for name, item in model.model_fields.items():
        inner = section_of(item.annotation)
        if inner is None:
            yield prefix + name
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def _below(prefix: str, changes: dict[str, Change]) -> dict[str, Change]:
    return {f"{prefix}.{name}": change for name, change in changes.items()}


def _optimizer(needs: dict[str, Any], prefix: str) -> dict[str, Change]:
    where = ("run", "weights")
    values = {
        "lr": 1e-2,
        "muon_lr": 2e-2,
        "beta1": 0.5,
        "beta2": 0.5,
        "weight_decay": 0.3,
        "warmup_steps": 6,
        "schedule": "cosine",
        "decay_start": 0.7,
        "min_lr_ratio": 0.7,
        "max_norm": 0.3,
    }
    return _below(prefix, {name: Change(value, needs, where) for name, value in values.items()})


HOSTS = {"job.kind": "hosts", "job.workers": ["tcp://127.0.0.4:26700", "tcp://127.0.0.5:26700"]}
PLACED = ("placed",)
GPU = {"generator.with_gpus": True}
BUILT = ("run", "titan")
SHAPING = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 2,
}
SERVED = ("run", "vllm")
WARM = {"warmup.steps": 12, "warmup.optimizer.warmup_steps": 2}
ADAPTED = {**WARM, "lora": {}}
QUICK_WARMUP = {"trainer.optimizer.warmup_steps": 2, "grpo.steps": 12}
TWO = {"trainer.procs": 2}
SHORT = "tests.trainers.loop.dry_run:ShortAnswers"
BUGGY = {"environment.options": {"buggy": True}, "grpo.steps": 20}
NIM = {"environment.name": "nim", "environment.options": {}}
CALCULATOR = {"environment.name": "calculator", "environment.options": {}}
CURRICULUM = {**LONG_RUN, "grpo.steps": 40, "tasks.order": "curriculum"}
REUSE = {**LONG_RUN, "grpo.replay.max_uses": 2}
FULL = {**LONG_RUN, "grpo.replay": {"max_uses": 3, "capacity": 1}, "grpo.groups_per_step": 3, "grpo.steps": 10}

KNOBS: dict[str, Change] = {
    "name": Change("another", where=("command",)),
    "output_dir": Change("elsewhere", where=("command",)),
    "method": Change("tests.forge_env.cli.fake_trainer:train", where=("command",)),
    "seed": Change(1),
    **_below(
        "environment",
        {
            "name": Change("tests.trainers.loop.dry_run:Differences"),
            "options": Change({"shades": 5}),
            "opponents": Change({"second": "environments.nim:Careless"}, NIM),
            "max_bug_rate": Change(0.0, BUGGY),
        },
    ),
    **_below(
        "tasks",
        {
            "order": Change("sequential"),
            "weights": Change({1: 1.0, 2: 3.0}),
            "options": Change({"stride": 3}, {"tasks.order": "tests.trainers.loop.dry_run:Strides"}),
            "explore": Change(1.0, CURRICULUM),
            "half_life": Change(0.1, CURRICULUM),
        },
    ),
    "rollouts.workers": Change(2),
    **_below(
        "sandbox",
        {
            "engine": Change("local"),
            "concurrency": Change(3),
            "base_image": Change("python:3.12-slim"),
            "docker_host": Change("ssh://elsewhere"),
            "options": Change({"cpus": 2.0}),
        },
    ),
    **_below(
        "model",
        {
            "path": Change("{root}/model"),
            "renderer": Change("prime-qwen3"),
            "tools": Change("text", CALCULATOR),
            "thinking": Change(True),
            "dtype": Change("bfloat16", where=("run", "titan", "vllm")),
            "max_length": Change(24, where=("run", "titan", "vllm")),
            "cache_dir": Change("{root}/other"),
        },
    ),
    **_below(
        "lora",
        {
            "rank": Change(4, ADAPTED, ("run", "weights")),
            "alpha": Change(4.0, ADAPTED, ("run", "weights")),
            "targets": Change(["q_proj"], ADAPTED, ("run", "weights")),
        },
    ),
    **_below(
        "model.tiny",
        {
            "layers": Change(2, where=BUILT),
            "dim": Change(64, where=BUILT),
            "heads": Change(8, where=BUILT),
            "kv_heads": Change(1, where=BUILT),
            "head_dim": Change(64, where=BUILT),
            "hidden_dim": Change(128, where=BUILT),
            "vocab_size": Change(320),
            "rope_theta": Change(5000.0, where=BUILT),
        },
    ),
    **_below(
        "warmup",
        {
            "steps": Change(2, WARM),
            "batch_size": Change(3, WARM),
            "threads": Change(1, WARM, ("run", "weights")),
        },
    ),
    **_optimizer(WARM, "warmup.optimizer"),
    **_below(
        "generator",
        {
            "num_replicas": Change(2),
            "engine": Change("async_llm"),
            "procs": Change(2, where=SERVED),
            "with_gpus": Change(True),
            "max_num_seqs": Change(8, where=SERVED),
            "gpu_memory_utilization": Change(0.5, GPU, SERVED),
            "kv_cache_gb": Change(2, where=SERVED),
            "threads": Change(2, where=SERVED),
            "spare": Change(False),
            "enforce_eager": Change(True, GPU, SERVED),
            "hosts": Change(2, {**HOSTS, "generator.procs": 2}, PLACED),
            "engine_args": Change({"enable_prefix_caching": False}, where=SERVED),
            "recompute_on_update": Change(True),
            "sleep": Change(True),
        },
    ),
    **_below(
        "generator.sampling",
        {
            **{name: Change(value, refused=True) for name, value in SHAPING.items()},
            "stop_token_ids": Change([7]),
        },
    ),
    **_below(
        "evaluation.sampling",
        {**{name: Change(value) for name, value in SHAPING.items()}, "stop_token_ids": Change([7])},
    ),
    **_below(
        "trainer",
        {
            "procs": Change(2),
            "hosts": Change(2, {**HOSTS, "trainer.procs": 2}, PLACED),
            "activation_checkpoint": Change("full", where=BUILT),
            "compile": Change(True, {"trainer.with_gpus": True}, BUILT),
            "with_gpus": Change(True),
            "threads": Change(2, where=("run", "weights")),
            "microbatch_tokens": Change(64, where=("run", "weights")),
            "share_prefixes": Change(False),
            "minibatches": Change(2, where=("run", "weights")),
        },
    ),
    **_below(
        "trainer.parallelism",
        {
            "data_parallel_shard_degree": Change(2, refused=True),
            "tensor_parallel_degree": Change(2, TWO),
            "context_parallel_degree": Change(2, TWO),
            "pipeline_parallel_degree": Change(2, TWO, refused=True),
        },
    ),
    **_optimizer(QUICK_WARMUP, "trainer.optimizer"),
    "weights.transport": Change("torchstore"),
    **_below(
        "grpo",
        {
            "steps": Change(3),
            "groups_per_step": Change(3),
            "group_size": Change(3),
            "max_off_policy_steps": Change(0),
            "temperature": Change(0.7),
            "max_tokens_per_turn": Change(7),
            "group_timeout_s": Change(20.0),
            "on_timeout": Change("zero", {"grpo.group_timeout_s": 20.0}),
            "sync_interval": Change(2),
            "advantage.name": Change("leave_one_out"),
            "advantage.options": Change({"epsilon": 1.0}, {"grpo.advantage.name": "group_normalized"}),
            "mask.name": Change(SHORT),
            "mask.options": Change({"tokens": 8}, {"grpo.mask.name": SHORT}),
            "filter.name": Change("with_signal"),
            "filter.options": Change({"high": 0.4}, {"grpo.filter.name": "reward_range"}),
            "loss.name": Change("cispo"),
            "loss.options": Change({"clip_high": 0.3}),
            "reference.source": Change("initial"),
            "reference.every": Change(2, {"grpo.reference": {"source": "lagging", "every": 1}}),
            "reference.path": Change("{root}/model", refused=True),
            "reference.procs": Change(2, {"grpo.reference.source": "initial"}),
            "reference.with_gpus": Change(True, {"grpo.reference.source": "initial"}),
        },
    ),
    **_below("sft", {"steps": Change(7, refused=True), "batch_size": Change(3, refused=True)}),
    **_below(
        "grpo.replay",
        {
            "sampling": Change("freshest", LONG_RUN),
            "options": Change({"alpha": 0.0}, {**LONG_RUN, "grpo.replay.sampling": "prioritized"}),
            "max_uses": Change(2, LONG_RUN),
            "capacity": Change(1, REUSE),
            "eviction": Change("least_advantage", FULL),
        },
    ),
    **_below(
        "evaluation",
        {
            "every": Change(1),
            "num_tasks": Change(2),
            "split": Change("unseen"),
            "temperature": Change(0.3),
            "pinned": Change(False),
            "metric": Change("reward"),
            "opponents": Change({"second": "environments.nim:Careless"}, NIM),
            "extra_splits": Change(["unseen"]),
            "extra_num_tasks": Change(2, {"evaluation.extra_splits": ["unseen"]}),
        },
    ),
    **_below(
        "checkpoint",
        {
            "every": Change(2, {"checkpoint.keep_best": 0}),
            "minutes": Change(0.2),
            "keep": Change(1, {"checkpoint": {"every": 1, "keep_best": 0}}),
            "keep_best": Change(0),
            "grace_s": Change(2.0, where=("terminated",)),
        },
    ),
    **_below(
        "logging",
        {
            "tensorboard": Change(True),
            "wandb": Change(True, where=("wandb",)),
            "loggers": Change([LISTENER]),
            "trajectories": Change("eval"),
            "timeline": Change(False),
        },
    ),
    **_below(
        "watchdog",
        {
            "warn_s": Change(20.0),
            "end_s": Change(30.0, {"watchdog.warn_s": 20.0}),
            "free_memory_gb": Change(1e6),
        },
    ),
    **_below(
        "job",
        {
            "kind": Change("skypilot", where=PLACED),
            "workers": Change(["tcp://127.0.0.6:26700"], HOSTS, PLACED),
            "port": Change(26800, {"job.kind": "skypilot"}, PLACED),
            "place": Change({"trainer": [1]}, HOSTS, PLACED),
            "on_loss": Change("wait", HOSTS, PLACED),
            "address": Change("127.0.0.9", HOSTS, PLACED),
            "share_gpus": Change(True, {**GPU, "trainer.with_gpus": True}, SERVED),
        },
    ),
}
