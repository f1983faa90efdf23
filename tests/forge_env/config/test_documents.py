"""The config of torchforge's documents parses as written, and every key of it acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_env.config import RunConfig, load_config
from forge_env.config.finding import read_run
from forge_env.config.reader import build
from forge_env.errors import ConfigError

DOCUMENTED = """\
model: Qwen/Qwen3-1.7B
dataset:
  path: openai/gsm8k
  split: train
  streaming: true
training:
  batch_size: 4
  learning_rate: 1e-6
  seq_len: 2048
  dtype: bfloat16
  gradient_accumulation_steps: 4
  sync_interval: 1
  entropy_coef: 0.01
grpo:
  n_samples: 8
  clip_low: 0.2
  clip_high: 0.28
  beta: 0.1
  temperature: 0.7
parallelism:
  tensor_parallel_degree: 1
  pipeline_parallel_degree: 1
  data_parallel_shard_degree: 2
services:
  generator: {procs: 1, num_replicas: 1, with_gpus: true}
  trainer: {procs: 2, num_replicas: 1, with_gpus: true}
  ref_model: {procs: 1, num_replicas: 1, with_gpus: true}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "documented.yaml"
    path.write_text(DOCUMENTED)
    return str(path)


def test_it_parses_as_written(file: str) -> None:
    config = load_config(file)
    assert (config.model.path, config.model.max_length, config.model.dtype) == ("Qwen/Qwen3-1.7B", 2048, "bfloat16")
    assert config.environment.name == "gsm8k"
    options = {"path": "openai/gsm8k", "split": "train", "streaming": True, "eval_fraction": 0.1}
    assert config.environment.options == {"dataset": options}
    assert (config.grpo.groups_per_step, config.grpo.group_size, config.grpo.temperature) == (16, 8, 0.7)
    assert config.grpo.loss.options == {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.1, "entropy_coef": 0.01}
    assert (config.grpo.reference.source, config.grpo.reference.with_gpus) == ("initial", True)
    assert (config.trainer.procs, config.trainer.parallelism.data_parallel_shard_degree) == (2, 2)
    assert (config.trainer.optimizer.lr, config.trainer.with_gpus, config.generator.with_gpus) == (1e-6, True, True)


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("Qwen/Qwen3-0.6B", {"model.path": "Qwen/Qwen3-0.6B"}),
    "dataset.path": ("rows.jsonl", {"environment.options": "rows.jsonl"}),
    "dataset.split": ("test", {"environment.options": "test"}),
    "dataset.streaming": ("false", {"environment.options": False}),
    "training.batch_size": ("2", {"grpo.groups_per_step": 8}),
    "training.gradient_accumulation_steps": ("1", {"grpo.groups_per_step": 4}),
    "training.learning_rate": ("2e-6", {"trainer.optimizer.lr": 2e-6}),
    "training.seq_len": ("512", {"model.max_length": 512}),
    "training.dtype": ("float32", {"model.dtype": "float32"}),
    "training.sync_interval": ("5", {"grpo.sync_interval": 5, "grpo.max_off_policy_steps": 4}),
    "training.entropy_coef": ("0.5", {"grpo.loss.options": 0.5}),
    "grpo.n_samples": ("4", {"grpo.group_size": 4}),
    "grpo.clip_low": ("0.3", {"grpo.loss.options": 0.3}),
    "grpo.clip_high": ("0.4", {"grpo.loss.options": 0.4}),
    "grpo.beta": ("0.2", {"grpo.loss.options": 0.2}),
    "grpo.temperature": ("1.5", {"grpo.temperature": 1.5}),
    "parallelism.tensor_parallel_degree": ("2", {"trainer.parallelism.tensor_parallel_degree": 2}),
    "parallelism.pipeline_parallel_degree": ("2", {"trainer.parallelism.pipeline_parallel_degree": 2}),
    "parallelism.data_parallel_shard_degree": ("4", {"trainer.parallelism.data_parallel_shard_degree": 4}),
    "services.generator.procs": ("2", {"generator.procs": 2}),
    "services.generator.num_replicas": ("3", {"generator.num_replicas": 3}),
    "services.generator.with_gpus": ("false", {"generator.with_gpus": False}),
    "services.trainer.procs": ("4", {"trainer.procs": 4}),
    "services.trainer.with_gpus": ("false", {"trainer.with_gpus": False}),
    "services.ref_model.procs": ("2", {"grpo.reference.procs": 2}),
    "services.ref_model.with_gpus": ("false", {"grpo.reference.with_gpus": False}),
}
FITTING = {
    "parallelism": "services.trainer.procs=4",
    "services.trainer.procs": "parallelism.data_parallel_shard_degree=4",
}
"""What else has to change so that processes and degrees agree."""


def changed(config: RunConfig, key: str) -> Any:
    found: Any = config.model_dump()
    for part in key.split("."):
        found = found[part]
    return found


@pytest.mark.parametrize("word", CHANGES)
def test_every_key_acts_and_the_command_line_has_the_last_word(file: str, word: str) -> None:
    text, wanted = CHANGES[word]
    fitting = [other for start, other in FITTING.items() if word.startswith(start)]
    before = load_config(file)
    for written in ([f"{word}={text}"], [f"--{word}", text]):
        config = load_config(file, [*written, *fitting])
        for key, value in wanted.items():
            found = changed(config, key)
            assert found == value or repr(value) in repr(found)
            assert found != changed(before, key)


@pytest.mark.parametrize("word", ["services.trainer.num_replicas", "services.ref_model.num_replicas"])
def test_what_there_is_one_of(file: str, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{word}: should be 1, not 2"):
        load_config(file, [f"{word}=2"])


def test_a_recipes_own_keys_override_the_words(file: str) -> None:
    config = load_config(
        file, ["--trainer.procs", "4", "--generator.procs", "4", "parallelism.data_parallel_shard_degree=4"]
    )
    assert (config.trainer.procs, config.generator.procs) == (4, 4)
    config = load_config(file, ["grpo.groups_per_step=3", "trainer.parallelism.data_parallel_shard_degree=-1"])
    assert (config.grpo.groups_per_step, config.trainer.parallelism.data_parallel_shard_degree) == (3, -1)
    assert load_config("coding_rlvr", ["training.batch_size=5"]).grpo.groups_per_step == 5


def test_without_beta_there_is_no_reference_model(file: str) -> None:
    config = load_config(file, ["grpo.beta=0"])
    assert (config.grpo.reference.source, config.grpo.reference.with_gpus) == ("none", False)
    kept = load_config("coding_rlvr", ["grpo.beta=0.1"])
    assert (kept.grpo.reference.source, kept.grpo.loss.options["beta"]) == ("initial", 0.1)


def test_degrees_say_how_many_processes_there_are(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "environment: {name: gsm8k}\nparallelism: {tensor_parallel_degree: 2, data_parallel_shard_degree: 2}\n"
    )
    assert load_config(str(path)).trainer.procs == 4


def test_a_dataset_to_imitate_is_one_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "method: sft\ndataset: {path: chats.jsonl}\ntraining: {batch_size: 3, gradient_accumulation_steps: 2}\n"
    )
    config = load_config(str(path))
    assert (config.environment.name, config.sft.batch_size) == ("conversations", 6)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("training: {batchsize: 1}", "r.yaml:2: training.batchsize: unknown key (did you mean training.batch_size?)"),
        ("training: {batch_size: 0}", "r.yaml:2: training.batch_size: should be greater than 0, not 0"),
        ("training: {dtype: half}", "r.yaml:2: training.dtype: should be"),
        ("training: 3", "r.yaml:2: training: should contain batch_size"),
        ("training: {gradient_accumulation_steps: x}", "accumulation_steps: should be a number above 0"),
        ("services: {generators: {}}", "services.generators: unknown key (did you mean services.generator?)"),
        ("services: {generator: {proc: 1}}", "services.generator.proc: unknown key (did you mean services"),
        (
            "generator: {procs: 1}\nservices: {generator: {procs: 2}}",
            "means the same as generator.procs: give only one",
        ),
        ("training: {sync_interval: 4}\ngrpo: {max_off_policy_steps: 1}", "sync_interval must be at most"),
    ],
)
def test_mistakes_are_told_in_the_words_that_were_written(tmp_path: Path, lines: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"environment: {{name: gsm8k}}\n{lines}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert said in str(caught.value)


def test_the_model_of_the_environment_gives_way_to_the_command_line(file: str) -> None:
    def model(*overrides: tuple[str, Any]) -> str:
        return build(RunConfig, read_run(file, overrides, {"MODEL": "Qwen/Qwen3-4B"})).model.path

    assert model() == "Qwen/Qwen3-4B"
    assert model(("model.dtype", "float32")) == "Qwen/Qwen3-4B"
    assert model(("model", "Qwen/Qwen3-8B")) == "Qwen/Qwen3-8B"
