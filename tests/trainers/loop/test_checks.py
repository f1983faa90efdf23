"""Recipes that the loop refuses before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forge_env.config import load_config
from forge_env.errors import ForgeError, PluginError, UsageError
from trainers.algorithms.grpo import train
from trainers.generator.arguments import engine_arguments
from trainers.model.folder import NEEDED


class Fussy:
    """A loss that cannot be made."""

    def __init__(self, strength: float = 1.0) -> None:
        raise RuntimeError("no strength is right")


class Silent:
    """No loss at all."""


def refusal(*overrides: str) -> ForgeError:
    with pytest.raises(ForgeError) as caught:
        train.check(load_config("coding_rlvr", overrides))
    return caught.value


@pytest.mark.parametrize("recipe", ["coding_rlvr", "coding_rlvr/qwen3_0_6b", "grpo/math_cpu"])
def test_bundled_recipes_are_sound(recipe: str) -> None:
    train.check(load_config(recipe))


def test_arguments_of_vllm_are_passed_on() -> None:
    train.check(load_config("coding_rlvr", ["generator.engine_args={max_num_batched_tokens: 4096, block_size: 32}"]))
    on_gpus = load_config("coding_rlvr/qwen3_0_6b", ["generator.engine_args={enable_chunked_prefill: false}"])
    train.check(on_gpus)
    arguments = engine_arguments(on_gpus, Path("folder"))
    assert (arguments["enable_chunked_prefill"], arguments["enforce_eager"]) == (False, False)


@pytest.mark.parametrize(
    ("override", "message", "fix"),
    [
        ("generator.procs=3", "does not divide the model's num_attention_heads", "generator.num_replicas"),
        ("generator.gpu_memory_utilization=0.5", "it is for generators on GPUs", "gpu_memory_utilization=0.9"),
        ("generator.enforce_eager=true", "generator.enforce_eager=true does nothing here", "enforce_eager=false"),
        (
            "generator.engine_args={max_num_batched_token: 4096}",
            "unknown key (did you mean generator.engine_args.max_num_batched_tokens?)",
            "",
        ),
        ("generator.engine_args={dtype: half}", "engine_args.dtype can't be set: it is a key", "use model.dtype"),
        ("generator.engine_args={async_scheduling: true}", "would be taken for one of the new weights", "leave it out"),
        ("generator.engine_args={quantization: fp8}", "other weights than the trainer's", "leave it out"),
        ("generator.engine_args={spec_model: small}", "its draft model would have to follow", "leave it out"),
        ("generator.engine_args={data_parallel_size: 2}", "use generator.procs and generator.num_replicas", "leave"),
        ("generator.engine_args={enable_chunked_prefill: true}", "a request with a seed", "leave it out"),
        ("generator.sampling.top_p=0.9", "which is what the trainer computes", "evaluation.sampling.top_p"),
        ("generator.sampling.min_tokens=3", "generator.sampling.min_tokens can't be set", "grpo.temperature"),
        (
            "evaluation={temperature: 0, sampling: {top_k: 5}}",
            "evaluation.sampling.top_k does nothing here",
            "raise evaluation.temperature",
        ),
        ("generator={with_gpus: true, kv_cache_gb: 2}", "it is for generators on a CPU", "kv_cache_gb=1"),
        ("generator={with_gpus: true, threads: 4}", "it is for generators on a CPU", "threads=1"),
        ("trainer={procs: 2, threads: 2}", "it is for a trainer of one process on a CPU", "trainer.threads=1"),
        ("trainer={with_gpus: true, threads: 2}", "it is for a trainer of one process on a CPU", "trainer.threads=1"),
        ("trainer.optimizer.schedule=constant", "decay_start=0.3 does nothing here", "decay_start=0.5, the default"),
        (
            "warmup={steps: 5, optimizer: {schedule: constant, min_lr_ratio: 0.3}}",
            "for schedules that decay",
            "min_lr_ratio=0.02",
        ),
        ("evaluation={extra_splits: [], extra_tasks: 32}", "extra_tasks=32 does nothing here", "extra_tasks=64"),
        ("model={path: tiny, renderer: llama-3}", "has no tokens for this chat format", "use one of qwen3, "),
        ("trainer.compile=true", "trainer.compile needs GPUs", "trainer.with_gpus=true"),
        (
            "trainer={procs: 2, parallelism: {pipeline_parallel_degree: 2}}",
            "pipelines take microbatches of one shape",
            "data_parallel_shard_degree",
        ),
        (
            "trainer={procs: 4, parallelism: {tensor_parallel_degree: 4}}",
            "tensor_parallel_degree=4 does not divide the model's num_key_value_heads (2)",
            "use a divisor",
        ),
        ("rollouts.workers=80", "at most 48 groups are under way at once (grpo.groups_per_step=24 for each of 2", "48"),
        ("model.path=./nowhere", "there is no folder './nowhere'", "checkpoint folder"),
        ("model={renderer: prime-qwen3, thinking: true}", "'prime-qwen3' has no switch for thinking", "thinking=false"),
        ("model.renderer=qwen33", "No renderer config registered", "model.renderer=qwen3"),
        ("evaluation.split=evel", "coding_rlvr has no split 'evel'", "did you mean 'eval'?"),
        ("evaluation.split=train", "is the split that is trained on", "choose a held-out one: eval"),
        ("evaluation.extra_splits=[nonesuch]", "evaluation.extra_splits: coding_rlvr has no split", "splits: train"),
        ("environment={name: blackjack, options: {}}", "blackjack has no split", "splits: "),
        (
            "grpo.loss.options={clip_lov: 1}",
            "options.clip_lov: unknown key (did you mean grpo.loss.options.clip_low?)",
            "",
        ),
        ("grpo.loss.options={clip_low: -1}", "clip_low: should be greater than or equal to 0, not -1", ""),
        (f"grpo.loss={{name: '{__name__}:Fussy', options: {{}}}}", "no strength is right", "its options: strength"),
    ],
)
def test_usage_is_refused_with_its_fix(override: str, message: str, fix: str) -> None:
    error = refusal(override)
    assert isinstance(error, UsageError)
    assert message in error.message
    assert fix in (error.fix or "")


def test_more_workers_than_sandboxes_are_refused() -> None:
    error = refusal("rollouts.workers=3", "sandbox.concurrency=2")
    assert "rollouts.workers=3 can't share sandbox.concurrency=2 sandboxes" in error.message


def test_what_a_schedule_does_not_use_may_be_at_its_default() -> None:
    constant = "warmup={steps: 5, optimizer: {schedule: constant}}"
    train.check(load_config("coding_rlvr", [constant, "evaluation.extra_splits=[]"]))


@pytest.mark.parametrize("name", [f"{__name__}:Absent", f"{__name__}:Silent", f"{__name__}:json", "no.module:Loss"])
def test_what_is_no_loss_is_refused(name: str) -> None:
    error = refusal(f"grpo.loss={{name: '{name}', options: {{}}}}")
    assert isinstance(error, PluginError)
    assert name in error.message


def sound(folder: Path, **changes: Any) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    config = {"model_type": "qwen3", **dict.fromkeys(NEEDED, 1), "max_position_embeddings": 4096, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros(64, dtype=np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"attention_bias": True}, "biases"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
    ],
)
def test_a_checkpoint_that_the_trainer_would_compute_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], feature: str
) -> None:
    with pytest.raises(UsageError, match=f"{feature}.* which the trainer lacks"):
        train.check(load_config("coding_rlvr", [f"model.path={sound(tmp_path, **changes)}"]))


def test_a_sound_folder_is_taken(tmp_path: Path) -> None:
    train.check(load_config("coding_rlvr", [f"model.path={sound(tmp_path)}"]))


def test_an_unsound_folder_is_refused(tmp_path: Path) -> None:
    def refused() -> str:
        return str(refusal(f"model.path={tmp_path}"))

    assert "no config.json" in refused()
    sound(tmp_path, model_type="llama")
    assert "is a 'llama' model" in refused()
    sound(tmp_path, max_position_embeddings=256)
    assert "model.max_length=512 is more than the model was made for (256)" in refused()
    weights = sound(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "model.safetensors is damaged" in refused()
    weights.unlink()
    assert "no weights" in refused()
    (tmp_path / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused()
    (tmp_path / "config.json").write_text("{")
    assert "can't be read" in refused()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "lacks hidden_size, head_dim" in refused()
