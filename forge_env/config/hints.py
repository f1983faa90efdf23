"""Hints for unknown keys: the keys that were probably meant.

A hint comes from the first of these that has one: `ALIASES`, keys of the same name in other sections, similar names in
the same section, similar names in other sections. A wrong hint costs more than none, so similar means nearly equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from forge_env.errors import did_you_mean

STEPS = ("grpo.steps", "sft.steps")
BATCH = ("grpo.groups_per_step", "sft.batch_size", "warmup.batch_size")
LENGTH = ("model.max_length",)
REPLY = ("grpo.max_tokens_per_turn", "max_tokens")
SAMPLES = ("grpo.group_size", "epochs")
TASKS = ("num_tasks", "evaluation.num_tasks")
MODEL = ("model.path", "model")
ENVIRONMENT = ("environment.name", "environments")
KL = ("grpo.loss.options.beta",)
LR = ("trainer.optimizer.lr", "warmup.optimizer.lr")
STALENESS = ("grpo.max_off_policy_steps",)
TRAINER_TP = ("trainer.parallelism.tensor_parallel_degree",)
CLIP = ("grpo.loss.options.clip_low", "grpo.loss.options.clip_high")
CONCURRENT = ("max_samples", "rollouts.workers", "generator.max_num_seqs", "sandbox.concurrency")
REQUESTS = ("concurrency", "generator.max_num_seqs")
FOLDER = ("out", "output_dir")
SCHEDULE = ("trainer.optimizer.schedule",)
MICROBATCH = ("trainer.microbatch_tokens",)
NORM = ("trainer.optimizer.max_norm",)
RANK = ("lora.rank",)
ADDRESS = ("base_url",)

ALIASES: dict[str, tuple[str, ...]] = {
    # Optimizer
    **dict.fromkeys(("lr", "learning_rate", "optim.lr", "actor_learning_rate", "policy_lr"), LR),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), SCHEDULE),
    **dict.fromkeys(("lr_warmup_steps", "warmup_ratio", "warmup_steps"), ("trainer.optimizer.warmup_steps",)),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad", "max_grad"), NORM),
    **{f"adam_beta{n}": (f"trainer.optimizer.beta{n}",) for n in (1, 2)},
    "weight_decay": ("trainer.optimizer.weight_decay",),
    # Length and batch of a run
    **dict.fromkeys(("steps", "num_steps", "total_training_steps", "training_steps"), STEPS),
    "max_steps": (*STEPS, "max_turns"),
    **dict.fromkeys(("num_train_epochs", "total_epochs", "num_epochs", "epochs", "num_episodes", "num_rollout"), STEPS),
    **dict.fromkeys(("total_steps", "n_steps", "num_train_steps", "train_steps", "iterations"), STEPS),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size", "rollout_batch_size"), BATCH),
    **dict.fromkeys(("global_batch_size", "train_global_batch_size", "num_prompts_per_step"), BATCH),
    **dict.fromkeys(("groups_per_batch", "groups"), BATCH[:1]),
    **dict.fromkeys(("gradient_accumulation_steps", "micro_batch_size", "micro_train_batch_size"), MICROBATCH),
    **dict.fromkeys(("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"), MICROBATCH),
    **dict.fromkeys(
        ("num_iterations", "ppo_epochs", "mini_batch_size", "ppo_mini_batch_size", "num_substeps"),
        ("trainer.minibatches",),
    ),
    **dict.fromkeys(("num_generations", "rollouts_per_example", "rollout.n", "n_samples", "samples_per_task"), SAMPLES),
    **dict.fromkeys(("rollouts_per_group", "trajectories_per_group", "n_samples_per_prompt"), SAMPLES),
    **dict.fromkeys(("num_generations_per_prompt", "group", "attempts", "repeats", "trials", "pass_at_k"), SAMPLES),
    # Loss
    **dict.fromkeys(("beta", "kl_coef", "kl_beta", "kl_tau", "kl_loss_coef", "kl_penalty_coef", "init_kl_coef"), KL),
    **dict.fromkeys(("kl", "kl_penalty", "use_kl_loss", "reference_policy_kl_penalty"), KL),
    **dict.fromkeys(("epsilon", "clip_ratio", "clip_range", "cliprange", "eps_clip"), CLIP),
    **dict.fromkeys(("epsilon_low", "clip_low", "clip_ratio_low", "ratio_clip_min"), CLIP[:1]),
    **dict.fromkeys(("epsilon_high", "clip_high", "clip_ratio_high", "ratio_clip_max", "eps_clip_high"), CLIP[1:]),
    **dict.fromkeys(("entropy_coef", "entropy_coeff", "entropy"), ("grpo.loss.options.entropy_coef",)),
    **dict.fromkeys(
        ("loss_type", "loss_fn", "loss.type", "policy_loss", "importance_sampling_level"), ("grpo.loss.name",)
    ),
    **dict.fromkeys(("adv_estimator", "scale_rewards", "advantage_estimator"), ("grpo.advantage.name",)),
    "mask_truncated_completions": ("grpo.mask.name",),
    **dict.fromkeys(("ref_model", "sync_ref_model"), ("grpo.reference.source",)),
    "ref_model_sync_steps": ("grpo.reference.every",),
    **dict.fromkeys(("max_async_level", "async_level", "max_staleness", "staleness"), STALENESS),
    # Sampling
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_completion_tokens", "max_completion_length"), REPLY),
    **dict.fromkeys(("max_response_length", "max_output_tokens", "response_length", "max_generation_length"), REPLY),
    **dict.fromkeys(("generate_max_len", "rollout_max_response_len", "max_generate_length"), REPLY),
    **dict.fromkeys(
        ("temperature", "temp", "rollout_temperature"), ("grpo.temperature", "temperature", "evaluation.temperature")
    ),
    **dict.fromkeys(("reasoning_effort", "sampling_args", "extra_body"), ("extra",)),
    # Model and environment
    **dict.fromkeys(("model_name", "model_name_or_path", "model.name", "model_path", "base_model", "pretrain"), MODEL),
    **dict.fromkeys(("max_seq_len", "seq_len", "max_seq_length", "max_model_len", "max_prompt_length"), LENGTH),
    **dict.fromkeys(("max_total_sequence_length", "prompt_max_len", "sequence_len", "context_length"), LENGTH),
    **dict.fromkeys(("chat_template",), ("model.renderer",)),
    **dict.fromkeys(("enable_thinking",), ("model.thinking",)),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "precision"), ("model.dtype",)),
    **dict.fromkeys(("lora_r", "lora_rank", "max_lora_rank", "adapter", "peft_config"), RANK),
    "lora_alpha": ("lora.alpha",),
    **dict.fromkeys(("lora_target_modules", "target_modules"), ("lora.targets",)),
    **dict.fromkeys(("env", "envs", "env_id", "env.id", "env_name", "task", "dataset_name"), ENVIRONMENT),
    **dict.fromkeys(("env_args", "env_kwargs", "task_args"), ("environment.options", "environments")),
    **dict.fromkeys(("datasets", "dataset_path", "train_files", "data_path"), ("environment.options",)),
    # Evaluation
    **dict.fromkeys(("n", "limit", "tasks", "num_examples", "samples", "max_tasks", "num_samples"), TASKS),
    **dict.fromkeys(
        ("eval_steps", "eval_every", "test_freq", "eval.interval", "eval_interval", "val_period"), ("evaluation.every",)
    ),
    "eval_strategy": ("evaluation.every",),
    **dict.fromkeys(("max_connections", "max_concurrent_requests", "parallel"), REQUESTS),
    **dict.fromkeys(("max_concurrent", "max_sandboxes", "n_concurrent", "max_workers", "workers"), CONCURRENT),
    **dict.fromkeys(
        ("api_base", "api_base_url", "model_base_url", "openai_base_url", "endpoint", "url", "host"), ADDRESS
    ),
    **dict.fromkeys(("api_key", "api_key_var"), ("api_key_env",)),
    "max_retries": ("retries",),
    "retry_on_error": ("sample_retries",),
    **dict.fromkeys(("max_turns", "message_limit"), ("turn_limit", "environment.options.max_turns")),
    "timeout": ("timeout_s", "time_limit", "grpo.group_timeout_s"),
    "fail_on_error": ("max_failures",),
    **dict.fromkeys(("log_dir", "output", "output_path", "save_path", "results_dir", "log_path", "output_dir"), FOLDER),
    **dict.fromkeys(("out", "out_dir", "default_local_dir", "save_dir"), FOLDER),
    # Machines
    **dict.fromkeys(
        ("num_gpus", "gpus", "n_gpus_per_node", "num_train_gpus", "gpus_per_node", "world_size"),
        ("trainer.procs", "generator.procs"),
    ),
    **dict.fromkeys(("num_infer_gpus", "tp", "tp_size", "tensor_parallel_size"), ("generator.procs",)),
    "vllm_tensor_parallel_size": ("generator.procs",),
    "vllm_gpu_memory_utilization": ("generator.gpu_memory_utilization",),
    "tensor_model_parallel_size": ("generator.procs", *TRAINER_TP),
    **dict.fromkeys(("nnodes", "num_nodes"), ("trainer.hosts", "generator.hosts")),
    **dict.fromkeys(("num_workers",), ("rollouts.workers",)),
    **dict.fromkeys(("gradient_checkpointing", "ac"), ("trainer.activation_checkpoint",)),
    # Records
    **dict.fromkeys(
        ("save_steps", "save_freq", "ckpt.interval", "save_interval", "save_every", "save_period"),
        ("checkpoint.every",),
    ),
    **dict.fromkeys(("save_total_limit", "ckpt.keep_last"), ("checkpoint.keep",)),
    **dict.fromkeys(
        ("report_to", "use_wandb", "wandb.project", "wandb_project", "project_name", "project"), ("logging.wandb",)
    ),
    **dict.fromkeys(("run_name", "experiment_name", "wandb.name"), ("name",)),
    **dict.fromkeys(("resume", "resume_from_checkpoint", "resume_mode", "resume_step"), ("--resume",)),
}
"""Keys of TRL, verl, OpenRLHF, slime, NeMo-RL, tinker, prime-rl, verifiers, Inspect and OpenAI's clients -> our keys.

Our keys are those of recipes and of evaluations, the likeliest first; those that a model doesn't have are left out.
"""


def meant(path: Sequence[str], siblings: Collection[str], keys: Collection[str], method: str = "") -> list[str]:
    """List the dotted keys that an unknown key may stand for, the likeliest first; those of `method` are preferred."""
    *section, name = (part.replace("-", "_").strip("_").lower() for part in path)
    suffixes = [".".join([*section[n:], name]) for n in range(len(path))]
    aliases = next((ALIASES[suffix] for suffix in suffixes if suffix in ALIASES), ())
    elsewhere = [key for key in keys if key.rpartition(".")[2] == name]
    candidates = [key for key in dict.fromkeys([*aliases, *elsewhere]) if _exists(key, keys)]
    if candidates:
        return sorted(candidates, key=lambda key: (-_shared(key, section), not key.startswith(f"{method}.")))
    if guess := did_you_mean(name, siblings):
        return [".".join([*section, guess])]
    guess = did_you_mean(name, dict.fromkeys(key.rpartition(".")[2] for key in keys))
    return [key for key in keys if key.rpartition(".")[2] == guess] if guess else []


def _exists(key: str, keys: Collection[str]) -> bool:
    """Whether a key exists, or is a flag, or an option in a section of options, whose names the model doesn't know."""
    before, options, _ = key.partition(".options.")
    return key in keys or key.startswith("--") or (bool(options) and f"{before}.options" in keys)


def _shared(key: str, section: Sequence[str]) -> int:
    """Number of leading parts that a key shares with a section."""
    same = [one == other for one, other in zip(key.split("."), section, strict=False)]
    return [*same, False].index(False)
