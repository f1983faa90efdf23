"""Hints for keys that users of other libraries bring along, and for misspelt ones."""

from __future__ import annotations

import re

import pytest

import forge_env as fe
from forge_env.cli.main import main
from forge_env.config.evaluation import EvaluationConfig
from forge_env.config.finding import load_config
from forge_env.config.hints import ALIASES
from forge_env.config.recipe import RunConfig
from forge_env.errors import ConfigError, did_you_mean

RECIPE = {
    "lr": "trainer.optimizer.lr",
    "warmup.learning_rate": "warmup.optimizer.lr",
    "steps": "grpo.steps",
    "max_steps": "grpo.steps",
    "num_generations": "grpo.group_size",
    "grpo.num_generations": "grpo.group_size",
    "beta": "grpo.loss.options.beta",
    "loss": "grpo.loss",
    "temperature": "grpo.temperature",
    "model.name": "model.path",
    "base_model": "model.path",
    "rollouts_per_group": "grpo.group_size",
    "env_args": "environment.options",
    "eval.interval": "evaluation.every",
    "run_name": "name",
    "resume_from_checkpoint": "--resume",
    "actor_rollout_ref.actor.optim.lr": "trainer.optimizer.lr",
    "actor_rollout_ref.rollout.n": "grpo.group_size",
    "trainer.n_gpus_per_node": "trainer.procs",
    "grpo.stepz": "grpo.steps",
    "n_samples_per_prompt": "grpo.group_size",
    "num_prompts_per_step": "grpo.groups_per_step",
    "eps_clip_high": "grpo.loss.options.clip_high",
    "init_kl_coef": "grpo.loss.options.beta",
    "rollout_temperature": "grpo.temperature",
    "checkpointing.save_period": "checkpoint.every",
    "epochs": "grpo.steps",
    "lr_": "trainer.optimizer.lr",
}
EVALUATION = {
    **dict.fromkeys(("n", "limit", "tasks", "num_examples", "samples", "max_tasks"), "num_tasks"),
    "max_new_tokens": "max_tokens",
    "model_base_url": "base_url",
    "temprature": "temperature",
    "temp": "temperature",
    "n_concurrent": "max_samples",
    "attempts": "epochs",
    "output_dir": "out",
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


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_leads_to_its_key(alias: str) -> None:
    found: set[str | None] = set()
    if alias not in RunConfig.model_fields:
        with pytest.raises(ConfigError) as caught:
            load_config("coding_rlvr", [f"{alias}=1"])
        found.add(hint(str(caught.value)))
    if alias != "resume" and alias not in EvaluationConfig.model_fields:
        with pytest.raises(ConfigError) as caught:
            fe.evaluate("calculator", "gold", **{alias: 1})
        found.add(hint(str(caught.value)))
    assert found & {*ALIASES[alias], "--resume"}


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
