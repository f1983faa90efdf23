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
    return {f"{prefix}.{name}": Change(value, needs, where) for name, value in values.items()}


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
    "environment.name": Change("tests.trainers.loop.dry_run:Differences"),
    "environment.options": Change({"shades": 5}),
    "environment.opponents": Change({"second": "environments.nim:Careless"}, NIM),
    "environment.max_bug_rate": Change(0.0, BUGGY),
    "tasks.order": Change("sequential"),
    "tasks.weights": Change({1: 1.0, 2: 3.0}),
    "tasks.options": Change({"stride": 3}, {"tasks.order": "tests.trainers.loop.dry_run:Strides"}),
    "tasks.explore": Change(1.0, CURRICULUM),
    "tasks.half_life": Change(0.1, CURRICULUM),
    "rollouts.workers": Change(2),
    "sandbox.engine": Change("local"),
    "sandbox.concurrency": Change(3),
    "sandbox.base_image": Change("python:3.12-slim"),
    "sandbox.docker_host": Change("ssh://elsewhere"),
    "sandbox.options": Change({"cpus": 2.0}),
    "model.path": Change("{root}/model"),
    "model.renderer": Change("prime-qwen3"),
    "model.tools": Change("text", CALCULATOR),
    "model.thinking": Change(True),
    "model.dtype": Change("bfloat16", where=("run", "titan", "vllm")),
    "model.max_length": Change(24, where=("run", "titan", "vllm")),
    "model.cache_dir": Change("{root}/other"),
    "lora.rank": Change(4, ADAPTED, ("run", "weights")),
    "lora.alpha": Change(4.0, ADAPTED, ("run", "weights")),
    "lora.targets": Change(["q_proj"], ADAPTED, ("run", "weights")),
    "model.tiny.layers": Change(2, where=BUILT),
    "model.tiny.dim": Change(64, where=BUILT),
    "model.tiny.heads": Change(8, where=BUILT),
    "model.tiny.kv_heads": Change(1, where=BUILT),
    "model.tiny.head_dim": Change(64, where=BUILT),
    "model.tiny.hidden_dim": Change(128, where=BUILT),
    "model.tiny.vocab_size": Change(320),
    "model.tiny.rope_theta": Change(5000.0, where=BUILT),
    "warmup.steps": Change(2, WARM),
    "warmup.batch_size": Change(3, WARM),
    "warmup.threads": Change(1, WARM, ("run", "weights")),
    **_optimizer(WARM, "warmup.optimizer"),
    "generator.num_replicas": Change(2),
    "generator.engine": Change("async_llm"),
    "generator.procs": Change(2, where=SERVED),
    "generator.with_gpus": Change(True),
    "generator.max_num_seqs": Change(8, where=SERVED),
    "generator.gpu_memory_utilization": Change(0.5, GPU, SERVED),
    "generator.kv_cache_gb": Change(2, where=SERVED),
    "generator.threads": Change(2, where=SERVED),
    "generator.spare": Change(False),
    "generator.enforce_eager": Change(True, GPU, SERVED),
    "generator.hosts": Change(2, {**HOSTS, "generator.procs": 2}, PLACED),
    "generator.engine_args": Change({"enable_prefix_caching": False}, where=SERVED),
    "generator.recompute_on_update": Change(True),
    "generator.sleep": Change(True),
    **{f"generator.sampling.{name}": Change(value, refused=True) for name, value in SHAPING.items()},
    "generator.sampling.stop_token_ids": Change([7]),
    **{f"evaluation.sampling.{name}": Change(value) for name, value in SHAPING.items()},
    "evaluation.sampling.stop_token_ids": Change([7]),
    "trainer.procs": Change(2),
    "trainer.hosts": Change(2, {**HOSTS, "trainer.procs": 2}, PLACED),
    "trainer.activation_checkpoint": Change("full", where=BUILT),
    "trainer.compile": Change(True, {"trainer.with_gpus": True, "model.dtype": "bfloat16"}, BUILT),
    "trainer.with_gpus": Change(True),
    "trainer.threads": Change(2, where=("run", "weights")),
    "trainer.microbatch_tokens": Change(64, where=("run", "weights")),
    "trainer.share_prefixes": Change(False),
    "trainer.minibatches": Change(2, where=("run", "weights")),
    "trainer.parallelism.data_parallel_shard_degree": Change(2, refused=True),
    "trainer.parallelism.tensor_parallel_degree": Change(2, TWO),
    "trainer.parallelism.context_parallel_degree": Change(2, TWO),
    "trainer.parallelism.pipeline_parallel_degree": Change(2, TWO, refused=True),
    **_optimizer(QUICK_WARMUP, "trainer.optimizer"),
    "weights.transport": Change("torchstore"),
    "grpo.steps": Change(3),
    "grpo.groups_per_step": Change(3),
    "grpo.group_size": Change(3),
    "grpo.max_off_policy_steps": Change(0),
    "grpo.temperature": Change(0.7),
    "grpo.max_tokens_per_turn": Change(7),
    "grpo.group_timeout_s": Change(20.0),
    "grpo.on_timeout": Change("zero", {"grpo.group_timeout_s": 20.0}),
    "grpo.sync_interval": Change(2),
    "grpo.advantage.name": Change("leave_one_out"),
    "grpo.advantage.options": Change({"epsilon": 1.0}, {"grpo.advantage.name": "group_normalized"}),
    "grpo.mask.name": Change(SHORT),
    "grpo.mask.options": Change({"tokens": 8}, {"grpo.mask.name": SHORT}),
    "grpo.filter.name": Change("with_signal"),
    "grpo.filter.options": Change({"high": 0.4}, {"grpo.filter.name": "reward_range"}),
    "grpo.loss.name": Change("cispo"),
    "grpo.loss.options": Change({"clip_high": 0.3}),
    "grpo.reference.source": Change("initial"),
    "grpo.reference.every": Change(2, {"grpo.reference": {"source": "lagging", "every": 1}}),
    "grpo.reference.path": Change("{root}/model", refused=True),
    "grpo.reference.procs": Change(2, {"grpo.reference.source": "initial"}),
    "grpo.reference.with_gpus": Change(True, {"grpo.reference.source": "initial"}),
    "sft.steps": Change(7, refused=True),
    "sft.batch_size": Change(3, refused=True),
    "grpo.replay.sampling": Change("freshest", LONG_RUN),
    "grpo.replay.options": Change({"alpha": 0.0}, {**LONG_RUN, "grpo.replay.sampling": "prioritized"}),
    "grpo.replay.max_uses": Change(2, LONG_RUN),
    "grpo.replay.capacity": Change(1, REUSE),
    "grpo.replay.eviction": Change("least_advantage", FULL),
    "evaluation.every": Change(1),
    "evaluation.num_tasks": Change(2),
    "evaluation.split": Change("unseen"),
    "evaluation.temperature": Change(0.3),
    "evaluation.pinned": Change(False),
    "evaluation.metric": Change("reward"),
    "evaluation.opponents": Change({"second": "environments.nim:Careless"}, NIM),
    "evaluation.extra_splits": Change(["unseen"]),
    "evaluation.extra_num_tasks": Change(2, {"evaluation.extra_splits": ["unseen"]}),
    "checkpoint.every": Change(2, {"checkpoint.keep_best": 0}),
    "checkpoint.minutes": Change(0.2),
    "checkpoint.keep": Change(1, {"checkpoint": {"every": 1, "keep_best": 0}}),
    "checkpoint.keep_best": Change(0),
    "checkpoint.grace_s": Change(2.0, where=("terminated",)),
    "logging.tensorboard": Change(True),
    "logging.wandb": Change(True, where=("wandb",)),
    "logging.loggers": Change([LISTENER]),
    "logging.trajectories": Change("eval"),
    "logging.timeline": Change(False),
    "watchdog.warn_s": Change(20.0),
    "watchdog.end_s": Change(30.0, {"watchdog.warn_s": 20.0}),
    "watchdog.free_memory_gb": Change(1e6),
    "job.kind": Change("skypilot", where=PLACED),
    "job.workers": Change(["tcp://127.0.0.6:26700"], HOSTS, PLACED),
    "job.port": Change(26800, {"job.kind": "skypilot"}, PLACED),
    "job.place": Change({"trainer": [1]}, HOSTS, PLACED),
    "job.on_loss": Change("wait", HOSTS, PLACED),
    "job.address": Change("127.0.0.9", HOSTS, PLACED),
    "job.share_gpus": Change(True, {**GPU, "trainer.with_gpus": True}, SERVED),
}
