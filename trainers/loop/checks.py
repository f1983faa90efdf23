"""Checks that the training loop applies to a recipe before anything is started."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import forge_env as fe
from forge_env.config.recipe import ORDERS, ModelSection, RunConfig, Section
from forge_env.endpoint.opponents import check_named
from forge_env.environment.base import Environment, resolve_task
from forge_env.environment.optional import demonstrate, seats_of
from forge_env.environment.tool_environment import ToolEnvironment
from forge_env.errors import UsageError, suggestion
from forge_env.job.needs import gpus_by_role
from forge_env.machine import user_path
from forge_env.tasks.curriculum import make_order
from forge_env.tasks.datasets import DatasetConfig
from trainers.buffer.rules import make_rules
from trainers.generator.arguments import check_engine_args, check_sampling
from trainers.model.adapter import targets
from trainers.model.folder import (
    TINY,
    check_compilable,
    check_folder,
    check_generator_heads,
    check_heads,
    check_windows,
    is_linear,
    local_folder,
    read_hf_config,
    vocabulary,
)
from trainers.model.tiny import hf_config

SHOWN = 4
"""Tasks of each split whose prompts are checked."""
GSPO_CLIP = 0.01
"""Smallest clip of GSPO's ratio that exceeds rounding errors in bfloat16 (measured in docs/losses.md)."""


def check(config: RunConfig) -> None:
    """Reject a recipe that this loop can't run, cheapest checks first."""
    check_devices(config)
    check_engine_args(config)
    check_sampling(config)
    check_idle_options(config)
    make_rules(config.grpo.replay)
    check_model(config)
    check_lora(config)
    check_reference(config)
    check_parallelism(config)
    check_environment(config)
    check_renderer(config)
    check_tools(config)
    check_workers(config)
    check_loss(config)


def check_workers(config: RunConfig) -> None:
    """Check that there are enough groups and sandboxes for every rollout worker."""
    workers, grpo = config.rollouts.workers, config.grpo
    groups = grpo.groups_per_step * (grpo.max_off_policy_steps + 1)
    if workers > groups:
        raise UsageError(
            f"rollouts.workers={workers}: at most {groups} groups are in progress at once "
            f"(grpo.groups_per_step={grpo.groups_per_step} for each of {grpo.max_off_policy_steps + 1} steps)",
            fix=f"use at most {groups}",
        )
    if config.sandbox.concurrency is not None and workers > config.sandbox.concurrency:
        raise UsageError(
            f"rollouts.workers={workers} can't share sandbox.concurrency={config.sandbox.concurrency} sandboxes",
            fix="use fewer workers, or more sandboxes",
        )


def check_loss(config: RunConfig) -> None:
    """Check that the loss accepts its options, has any reference model it needs, and doesn't clip rounding errors."""
    from trainers.losses.grpo import GSPOLoss  # takes seconds: torch
    from trainers.losses.load import make_loss
    from trainers.losses.types import needs

    loss = make_loss(config.grpo.loss)
    if (
        config.model.dtype == "bfloat16"
        and isinstance(loss, GSPOLoss)
        and loss.correction is None
        and min(loss.clip_low, loss.clip_high) < GSPO_CLIP
    ):
        raise UsageError(
            f"grpo.loss {config.grpo.loss.name!r} without a correction clips rounding errors: in model.dtype=bfloat16 "
            f"trainer and generator differ so much that the ratio of unchanged weights leaves {1 - loss.clip_low:g} to "
            f"{1 + loss.clip_high:g}, and a third of the sequences or more lose their gradient (docs/losses.md)",
            fix="use grpo.loss.options.correction={name: tis, level: geometric}, "
            f"or clip_low and clip_high of {GSPO_CLIP:g} or more",
        )
    if needs(loss).reference and config.grpo.reference.source == "none":
        raise UsageError(
            f"grpo.loss {config.grpo.loss.name!r} compares the policy with a reference model, but the recipe has none",
            fix="use grpo.reference.source=initial, or grpo.loss.options.beta=0 if the loss has it",
        )


def check_devices(config: RunConfig) -> None:
    """Reject changed options that have no effect on the device they apply to."""
    generator, trainer, warmup = config.generator, config.trainer, config.warmup
    if len(gpus_by_role(config)) < 2:
        _refuse_turned("job", config.job, ("share_gpus",), "recipes with several roles on GPUs")
    if generator.with_gpus != trainer.with_gpus or (generator.with_gpus and not config.job.share_gpus):
        _refuse_turned("generator", generator, ("sleep",), "generators that share processors or GPUs with the trainer")
    if not generator.with_gpus:
        _refuse_turned("generator", generator, ("gpu_memory_utilization", "enforce_eager"), "generators on GPUs")
    elif config.job.share_gpus:
        dedicated = "generators with their own GPUs; sharing ones use kv_cache_gb"
        _refuse_turned("generator", generator, ("gpu_memory_utilization",), dedicated)
        _refuse_turned("generator", generator, ("threads",), "generators on a CPU")
    else:
        _refuse_turned("generator", generator, ("kv_cache_gb", "threads"), "generators on a CPU")
    if trainer.with_gpus or trainer.procs > 1:
        alone = "a trainer of one process on a CPU"
        # a reference model of one process uses trainer.threads too
        if config.grpo.reference.source == "none" or config.grpo.reference.procs > 1:
            _refuse_turned("trainer", trainer, ("threads",), alone)
        if warmup is not None:
            _refuse_turned("warmup", warmup, ("threads",), alone)


def check_idle_options(config: RunConfig) -> None:
    """Reject changed options of a decay, of method=sft or of extra splits if the recipe doesn't use these."""
    for name, phase in (("trainer", config.trainer), ("warmup", config.warmup if warms_up(config) else None)):
        if phase is not None and phase.optimizer.schedule == "constant":
            usual: Section = type(phase).model_fields["optimizer"].default
            shape = ("decay_start", "min_lr_ratio")
            _refuse_turned(f"{name}.optimizer", phase.optimizer, shape, "schedules that decay", usual)
    if config.method != "sft":
        _refuse_turned("sft", config.sft, tuple(type(config.sft).model_fields), "method=sft")
    if not config.evaluation.extra_splits:
        _refuse_turned("evaluation", config.evaluation, ("extra_num_tasks",), "splits in evaluation.extra_splits")


def _refuse_turned(
    prefix: str, section: Section, names: Sequence[str], meant_for: str, usual: Section | None = None
) -> None:
    for name in names:
        default = type(section).model_fields[name].default if usual is None else getattr(usual, name)
        if (value := getattr(section, name)) != default:
            raise UsageError(
                f"{prefix}.{name}={json.dumps(value)} has no effect here: it is for {meant_for}",
                fix=f"use {prefix}.{name}={json.dumps(default)}, the default",
            )


def check_parallelism(config: RunConfig) -> None:
    """Check that trainer and generators can be parallelized as the recipe says."""
    section = config.trainer
    dims = section.parallelism
    if section.compile and not section.with_gpus:
        raise UsageError("trainer.compile needs GPUs", fix="use trainer.compile=false, or trainer.with_gpus=true")
    if section.compile and config.model.dtype == "float32":
        raise UsageError(
            "trainer.compile does not support float32, in which torch can't compile the gradient of attention",
            fix="use model.dtype=bfloat16, or trainer.compile=false",
        )
    if dims.pipeline_parallel_degree > 1:
        raise UsageError(
            "trainer.parallelism.pipeline_parallel_degree: TorchTitan's pipelines take microbatches of one shape and "
            "untied embeddings, and rollouts have neither",
            fix="use data_parallel_shard_degree or tensor_parallel_degree instead",
        )
    shape = config.model.tiny
    folder = None if config.model.path == TINY else local_folder(config.model.path)
    hf = None if folder is None else read_hf_config(folder)
    if config.model.path == TINY:
        hf = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    if hf is not None:
        check_heads(hf, dims.tensor_parallel_degree, dims.context_parallel_degree)
        check_generator_heads(hf, config.generator.procs)
    if folder is not None:
        check_precision(config, folder)


def check_precision(config: RunConfig, folder: Path) -> None:
    """Reject models with layers without a GPU kernel for this precision, or that `trainer.compile` doesn't support."""
    hf, in_float32 = read_hf_config(folder), config.model.dtype == "float32"
    if config.trainer.with_gpus:
        check_windows(folder, hf, config.model.max_length, in_float32=in_float32)
    if config.trainer.compile:
        check_compilable(folder, hf)
    generates = config.rolls_out and config.generator.with_gpus and in_float32
    if generates and any(is_linear(hf, layer) for layer in range(hf["num_hidden_layers"])):
        raise UsageError(
            f"{folder} has gated delta layers, which vLLM supports on GPUs in bfloat16 only",
            fix="use model.dtype=bfloat16",
        )


def warms_up(config: RunConfig) -> bool:
    """Whether the recipe has a warm-up."""
    return config.warmup is not None and config.warmup.steps > 0


def check_model(config: RunConfig) -> None:
    """Check the model: `tiny`, a valid checkpoint folder, or possibly a hub name, which isn't checked here."""
    if config.model.path == TINY:
        return
    folder = local_folder(config.model.path)
    if folder is not None and user_path(config.model.path).is_dir():
        check_checkpoint(folder, config.model)
    elif folder is not None:  # comes with forge-env: a full check would delay every start by seconds
        check_folder(folder, config.model.max_length)


def check_lora(config: RunConfig) -> None:
    """Check the layers that get adapters, and reject options without effect; hub models are checked once downloaded."""
    if config.lora is None:
        return
    if config.trainer.optimizer.muon_lr > 0:
        raise UsageError(
            "trainer.optimizer.muon_lr is for hidden matrices, which lora doesn't train",
            fix="use trainer.optimizer.muon_lr=0 with lora",
        )
    if config.grpo.reference.source == "initial":
        _refuse_turned("grpo.reference", config.grpo.reference, ("procs", "with_gpus"), "models with their own process")
    if config.model.path == TINY:
        if not warms_up(config):
            raise UsageError(
                "lora: a model that is built here has random weights, which adapters would not train",
                fix="use a checkpoint (model.path), or a warm-up (warmup.steps)",
            )
        targets(config.lora, hf_config(config.model, config.model.tiny.vocab_size, 0))
    elif (folder := local_folder(config.model.path)) is not None:
        targets(config.lora, read_hf_config(folder))


def check_checkpoint(folder: Path, model: ModelSection) -> None:
    """Check that a checkpoint folder has its family's weights and a tokenizer for the chat format."""
    from trainers.model.chat import Chat

    check_files(folder, model.max_length)
    Chat.of(folder, model)


def check_files(folder: Path, max_length: int) -> None:
    """Check that a checkpoint folder's files are complete and contain the weights of its family's model."""
    check_folder(folder, max_length)
    from trainers.titan.model import check_weights  # takes seconds: torch

    check_weights(folder)


def check_reference(config: RunConfig) -> None:
    """Check a reference model's separate checkpoint: a valid folder, or possibly a hub name, which isn't checked."""
    path = config.grpo.reference.path
    try:
        folder = None if path is None else local_folder(path)
    except UsageError as error:
        raise UsageError(
            f"grpo.reference.path: there is no folder {path!r}",
            fix="name a checkpoint folder or a hub name; the teacher of distill/math_cpu is trained first: "
            "forge-env train sft/math_cpu --name math_teacher",
        ) from error
    if folder is None:
        return
    check_files(folder, config.model.max_length)
    policy_folder = None if config.model.path == TINY else local_folder(config.model.path)
    if policy_folder is not None:
        check_vocabulary(policy_folder, folder)


def check_vocabulary(own: Path, reference: Path) -> None:
    """Check that the reference model has the same vocabulary as the trained model."""
    if vocabulary(own) != vocabulary(reference):
        raise UsageError(
            f"grpo.reference.path: {reference} has another vocabulary than the trained model",
            fix="use a checkpoint of the same model family",
        )


def check_environment(config: RunConfig) -> None:
    """Check that splits exist, the evaluated one is held out, and demonstrations are available if needed."""
    section = config.environment
    environment: Environment = fe.make(section.name, **section.options)
    evaluation = config.evaluation
    check_named(section.name, seats_of(environment), section.opponents, "environment.opponents")
    check_named(section.name, seats_of(environment), evaluation.opponents or {}, "evaluation.opponents")
    for key, split in (("split", evaluation.split), *(("extra_splits", split) for split in evaluation.extra_splits)):
        if split not in environment.splits:
            fix = suggestion(split, environment.splits, f"splits: {', '.join(environment.splits)}")
            raise UsageError(f"evaluation.{key}: {section.name} has no split {split!r}", fix=fix)
    if evaluation.split == environment.splits[0]:
        raise UsageError(
            f"evaluation.split={evaluation.split} is also the training split",
            fix=f"choose a held-out one: {', '.join(environment.splits[1:]) or 'the environment has none'}",
        )
    datasets = (value for _, value in environment.config if isinstance(value, DatasetConfig))
    if undivided := next((dataset for dataset in datasets if not dataset.is_divided), None):
        raise UsageError(
            f"{section.name}: evaluation.split={evaluation.split} has the training data, {undivided.path}",
            fix="hold some of it out: environment.options.dataset.eval_fraction=0.1, or name `splits`",
        )
    check_images(section.name, environment, [environment.splits[0], evaluation.split, *evaluation.extra_splits])
    if config.tasks.order not in ORDERS:
        make_order(config.tasks, environment, environment.splits[0], seed=config.seed)
    if (config.model.path == TINY or warms_up(config)) and not _demonstrates(environment):
        what = "build a model from" if config.model.path == TINY else "warm up on"
        raise UsageError(
            f"{section.name} gives no demonstrations to {what}",
            fix="define `demonstrate(task, rng)`, or use a trained model: model.path=Qwen/Qwen3-0.6B warmup=null",
        )


def _demonstrates(environment: Environment) -> bool:
    first = resolve_task(environment, None, {"split": environment.splits[0], "index": 0})
    return demonstrate(environment, first, random.Random(0)) is not None


def check_images(name: str, environment: Environment, splits: Sequence[str]) -> None:
    """Check that prompts have no images, by the first tasks of each split: the models trained here read text only."""
    if not isinstance(environment, ToolEnvironment):
        return
    for split in dict.fromkeys(splits):
        known = environment.num_tasks(split)
        for index in range(1 if known is None else min(known, SHOWN)):
            task = resolve_task(environment, None, {"split": split, "index": index})
            if _has_images(environment, task):
                raise UsageError(
                    f"{name}: the prompt of task {task.id!r} has images, and models trained here read text only",
                    fix="evaluate it with a vision model: forge-env eval --model NAME --base-url URL, or show text",
                )


def _has_images(environment: ToolEnvironment, task: fe.Task) -> bool:
    try:
        prompt = environment.prompt(task)
    except Exception:  # noqa: BLE001 - it may need an episode's state; its images are refused when they are rendered
        prompt = list(task.history)
    return any(message.images for message in prompt)


def check_renderer(config: RunConfig) -> None:
    """Check that there is the chat format that the recipe names."""
    from trainers.model.chat import chat_format
    from trainers.model.tokenizer import FORMATS

    model = config.model
    if model.path == TINY and model.renderer not in ("auto", *FORMATS):
        raise UsageError(
            f"model.renderer={model.renderer}: a model built here has no tokens for this chat format",
            fix=f"use one of {', '.join(FORMATS)}",
        )
    if model.renderer in ("auto", "chatml"):
        return
    try:
        chat_format(model.renderer, thinking=False)
    except ValueError as error:
        raise UsageError(
            f"model.renderer: {error}",
            fix="use model.renderer=auto, the model's own chat template; for Qwen 3 also qwen3, for Llama 3 llama-3",
        ) from error
    if model.thinking:
        try:
            chat_format(model.renderer, thinking=True)
        except ValueError as error:
            raise UsageError(f"model.thinking: {error}", fix="use model.thinking=false, or another format") from error


def check_tools(config: RunConfig, folder: Path | None = None) -> None:
    """Check that the chat format of `folder`, or of a local `model.path`, can offer the environment's tools."""
    if folder is None and config.model.path != TINY and user_path(config.model.path).is_dir():
        folder = local_folder(config.model.path)
    if folder is None:
        return
    from trainers.model.chat import Chat

    environment: Environment = fe.make(config.environment.name, **config.environment.options)
    if environment.tools and (reason := Chat.of(folder, config.model).refusal_of_tools()):
        raise UsageError(
            f"{config.environment.name} has tools, and {reason}",
            fix="describe them as text: model.tools=text (and `forge-env eval --tools text`)",
        )
