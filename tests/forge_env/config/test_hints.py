"""Hints for keys that users of other libraries bring along, and for misspelt ones."""

from __future__ import annotations

import re

import pytest

import forge_env as fe
from forge_env.cli.main import main
from forge_env.config.evaluation import EvaluationConfig
from forge_env.config.finding import load_config
from forge_env.config.hints import ALIASES
from forge_env.config.reader import keys
from forge_env.config.recipe import RunConfig
from forge_env.environment.single_turn import SingleTurnConfig
from forge_env.errors import ConfigError, did_you_mean

RECIPE = {
    "lr": "trainer.optimizer.lr",
    "learning_rate": "trainer.optimizer.lr",
    "warmup.learning_rate": "warmup.optimizer.lr",
    "lr_scheduler_type": "trainer.optimizer.schedule",
    "max_grad_norm": "trainer.optimizer.max_norm",
    "adam_beta2": "trainer.optimizer.beta2",
    "weight_decay": "trainer.optimizer.weight_decay",
    "max_steps": "grpo.steps",
    "steps": "grpo.steps",
    "num_train_epochs": "grpo.steps",
    "batch_size": "grpo.groups_per_step",
    "per_device_train_batch_size": "grpo.groups_per_step",
    "gradient_accumulation_steps": "trainer.microbatch_tokens",
    "num_iterations": "trainer.minibatches",
    "num_generations": "grpo.group_size",
    "grpo.num_generations": "grpo.group_size",
    "rollouts_per_example": "grpo.group_size",
    "kl_coef": "grpo.loss.options.beta",
    "beta": "grpo.loss.options.beta",
    "epsilon": "grpo.loss.options.clip_low",
    "epsilon_high": "grpo.loss.options.clip_high",
    "loss": "grpo.loss",
    "loss_type": "grpo.loss.name",
    "scale_rewards": "grpo.advantage.name",
    "temperature": "grpo.temperature",
    "max_tokens": "grpo.max_tokens_per_turn",
    "max_new_tokens": "grpo.max_tokens_per_turn",
    "max_completion_length": "grpo.max_tokens_per_turn",
    "max_seq_len": "model.max_length",
    "seq_len": "model.max_length",
    "max_model_len": "model.max_length",
    "model_name": "model.path",
    "model.name": "model.path",
    "enable_thinking": "model.thinking",
    "lora_r": "lora.rank",
    "env": "environment.name",
    "env_id": "environment.name",
    "env_args": "environment.options",
    "max_async_level": "grpo.max_off_policy_steps",
    "async_level": "grpo.max_off_policy_steps",
    "eval_steps": "evaluation.every",
    "eval.interval": "evaluation.every",
    "num_examples": "evaluation.num_tasks",
    "save_steps": "checkpoint.every",
    "ckpt.keep_last": "checkpoint.keep",
    "gpu_memory_utilization": "generator.gpu_memory_utilization",
    "tensor_parallel_size": "generator.procs",
    "num_gpus": "trainer.procs",
    "nnodes": "trainer.hosts",
    "num_workers": "rollouts.workers",
    "gradient_checkpointing": "trainer.activation_checkpoint",
    "wandb": "logging.wandb",
    "report_to": "logging.wandb",
    "run_name": "name",
    "resume": "--resume",
    "resume_from_checkpoint": "--resume",
    "data.train_batch_size": "grpo.groups_per_step",
    "data.max_response_length": "grpo.max_tokens_per_turn",
    "actor_rollout_ref.actor.optim.lr": "trainer.optimizer.lr",
    "actor_rollout_ref.rollout.n": "grpo.group_size",
    "algorithm.adv_estimator": "grpo.advantage.name",
    "trainer.test_freq": "evaluation.every",
    "trainer.n_gpus_per_node": "trainer.procs",
    "orchestrator.rollouts_per_example": "grpo.group_size",
    "grpo.stepz": "grpo.steps",
}
EVALUATION = {
    **dict.fromkeys(("n", "limit", "tasks", "num_examples", "samples", "max_tasks"), "num_tasks"),
    "rollouts_per_example": "epochs",
    "max_connections": "concurrency",
    "max_concurrent": "max_samples",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "message_limit": "turn_limit",
    "api_base": "base_url",
    "model_base_url": "base_url",
    "api_key": "api_key_env",
    "max_retries": "retries",
    "timeout": "timeout_s",
    "log_dir": "out",
    "fail_on_error": "max_failures",
    "reasoning_effort": "extra",
    "temprature": "temperature",
}


def hint(message: str) -> str | None:
    match = re.search(r"did you mean ([^?]+)\?", message)
    return match and match[1]


@pytest.mark.parametrize(("key", "meant"), RECIPE.items(), ids=RECIPE)
def test_keys_of_a_recipe(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("coding_rlvr", [f"{key}=1"])
    assert hint(str(caught.value)) == meant


@pytest.mark.parametrize(("key", "meant"), EVALUATION.items(), ids=EVALUATION)
def test_keys_of_an_evaluation(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fe.evaluate("calculator", "gold", **{key: 1})
    assert hint(str(caught.value)) == meant


def test_every_key_of_an_ambiguous_name_is_listed() -> None:
    with pytest.raises(ConfigError, match=r"did you mean grpo.steps\? Also possible: sft.steps, warmup.steps\)"):
        load_config("coding_rlvr", ["steps=1"])
    with pytest.raises(ConfigError, match=r"did you mean sft.steps\? Also possible: grpo.steps, warmup.steps\)"):
        load_config("coding_rlvr", ["method=sft", "steps=1"])


@pytest.mark.parametrize("key", ["model.colour", "grpo.max", "tempo", "min_steps", "generator.tokens"])
def test_a_key_like_no_other_gets_no_hint(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("coding_rlvr", [f"{key}=1"])
    assert hint(str(caught.value)) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tempratre", "temperature"),
        ("stpes", "steps"),
        ("step", "steps"),
        ("timeout", "timeout_s"),
        ("min_tokens", None),
    ],
)
def test_only_nearly_equal_names_are_misspellings(name: str, meant: str | None) -> None:
    assert did_you_mean(name, ["max_tokens", "temperature", "steps", "timeout_s", "lr"]) == meant


def test_aliases_stand_for_keys_that_exist() -> None:
    known = {*keys(RunConfig), *keys(EvaluationConfig), *keys(SingleTurnConfig), "--resume"}
    targets = {key.partition(".options.")[0] for values in ALIASES.values() for key in values}
    assert targets <= known | {f"{key.removesuffix('.options')}" for key in known}


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["validate", "gsm8k", "--tasks", "3"], "--num-tasks"),
        (["validate", "gsm8k", "--limit", "3"], "--num-tasks"),
        (["train", "coding_rlvr", "--resum"], "--resume"),
        (["train", "coding_rlvr", "--resume-from-checkpoint", "5"], "--resume"),
        (["view", "--prot", "80"], "--port"),
        (["eval", "gsm8k", "--model", "gold", "--num-examples", "5"], "num_tasks"),
        (["eval", "gsm8k", "--model", "gold", "--max-turn", "5"], "max_turns"),
        (["play", "gsm8k", "--splitt", "eval"], "--split"),
    ],
    ids=" ".join,
)
def test_flags_of_a_command(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert hint(capsys.readouterr().err) == meant
