"""All that differs between a generator on a CPU and one on a GPU: what vLLM is told before its engine is made."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Platform:
    """What vLLM is told on one kind of device.

    Attributes:
        environment: variables by name; `{threads}` and `{kv_cache_gb}` are the recipe's.
        attributes: of vLLM's modules, by their path.
        limits_threads: whether the engine keeps to the recipe's number of threads.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    limits_threads: bool = False


EVERYWHERE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
CPU = Platform(
    environment={
        "VLLM_CPU_KVCACHE_SPACE": "{kv_cache_gb}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "{threads}",
        # vLLM compiles a few sampling helpers, which on a CPU takes seconds and gains nothing.
        "TORCHDYNAMO_DISABLE": "1",
    },
    # oneDNN's GEMM handlers keep stale copies after the second weight load; plain layout does not.
    attributes={"vllm._custom_ops._supports_onednn": False},
    limits_threads=True,
)
GPU = Platform()


def process_environment(*, with_gpus: bool, threads: int, kv_cache_gb: int) -> dict[str, str]:
    """Variables of a generator's process; some libraries read theirs when it starts."""
    platform = GPU if with_gpus else CPU
    variables = {**EVERYWHERE, **platform.environment}
    return {name: value.format(threads=threads, kv_cache_gb=kv_cache_gb) for name, value in variables.items()}


def prepare_process(*, with_gpus: bool, threads: int, kv_cache_gb: int) -> None:
    """Set what vLLM must see before its engine is made in this process."""
    platform = GPU if with_gpus else CPU
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # It says at import, before it has set its level, that a CPU needs no Triton.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    os.environ.update(process_environment(with_gpus=with_gpus, threads=threads, kv_cache_gb=kv_cache_gb))
    if platform.limits_threads:
        import torch

        torch.set_num_threads(threads)
    for path, value in platform.attributes.items():
        module, _, attribute = path.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
