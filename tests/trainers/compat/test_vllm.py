"""What `trainers.compat.vllm` assumes about vLLM."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from forge_env.errors import UsageError
from tests.trainers.compat.sources import parameters, source
from trainers.compat import vllm as compat

if compat.PACKAGE.installed is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

UTILS = "vllm.model_executor.layers.utils"
EXPERTS = "vllm.model_executor.layers.fused_moe"
COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator"
EXECUTOR = "vllm.v1.executor.uniproc_executor"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("vllm._custom_ops", "_supports_onednn = bool("),
        (f"{UTILS}:dispatch_cpu_unquantized_gemm", "if ops._supports_onednn and"),
        (
            f"{UTILS}:dispatch_cpu_unquantized_gemm",
            "layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear",
        ),
        (f"{UTILS}:dispatch_unquantized_gemm", "elif current_platform.is_cpu():\n        return cpu_unquantized_gemm"),
        (f"{UTILS}:cpu_unquantized_gemm", "\n    return layer.cpu_linear(x, weight, bias)"),
        (
            f"{EXPERTS}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel",
            "convert_to_unquantized_kernel_format(self.unquantized_backend, moe_config=layer.moe_config, "
            "w13_weight=w13, w2_weight=w2, layer=layer)",
        ),
        (
            f"{EXPERTS}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel",
            "self.moe_kernel.fused_experts.process_weights_after_loading(layer)",
        ),
        (f"{COMMUNICATOR}.__init__", "and self._all_group_ranks_share_shm_group_name():"),
        (f"{EXECUTOR}:UniProcExecutor._init_executor", "method, rank, local_rank = self._distributed_args()"),
        (
            f"{EXECUTOR}:ExecutorWithExternalLauncher._distributed_args",
            "return (distributed_init_method, rank, local_rank)",
        ),
        (
            "vllm.v1.engine.output_processor:OutputProcessor.__init__",
            "self.request_states: dict[str, RequestState] = {}",
        ),
        ("vllm.v1.engine.output_processor:RequestState.__init__", "self.external_req_id = external_req_id"),
        ("vllm.v1.engine.output_processor:RequestState.__init__", "self.detokenizer = detokenizer"),
        ("vllm.v1.engine.output_processor:RequestState.__init__", "self.logprobs_processor = logprobs_processor"),
        ("vllm.v1.engine.detokenizer:IncrementalDetokenizer.num_output_tokens", "return len(self.token_ids)"),
        ("vllm.v1.engine.detokenizer:IncrementalDetokenizer.output_token_ids", "return self.token_ids"),
        ("vllm.v1.engine.logprobs:LogprobsProcessor", "logprobs: SampleLogprobs | None"),
    ],
)
def test_vllm_uses_the_names_as_assumed(path: str, text: str) -> None:
    assert text in source(path)


def test_replaced_functions_have_the_same_parameters() -> None:
    originals = {
        compat.padded_gemm: f"{UTILS}:cpu_unquantized_gemm",
        compat.packed_experts: f"{EXPERTS}.oracle.unquantized:convert_to_unquantized_kernel_format",
    }
    for replacement, path in originals.items():
        assert list(inspect.signature(replacement).parameters) == parameters(path)
    assert parameters(f"{COMMUNICATOR}._all_group_ranks_share_shm_group_name") == ["self"]
    assert parameters(f"{EXECUTOR}:ExecutorWithExternalLauncher._distributed_args") == ["self"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    command = ("sh", "-c", "sleep 1000 & echo; exec sleep 1000")
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow  # imports vLLM
async def test_an_engine_is_shut_down_although_one_of_its_processes_ends_meanwhile(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1 import utils

    from trainers.actors.processes import end_of
    from trainers.generator.async_llm import AsyncLLMEngine

    children = psutil.Process.children

    def children_of_which_one_ends(parent: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        with subprocess.Popen(("sleep", "1000")) as ending:
            listed = [psutil.Process(ending.pid), *children(parent, recursive)]
            ending.kill()
        return listed

    monkeypatch.setattr(psutil.Process, "children", children_of_which_one_ends)
    monkeypatch.setattr(utils, "kill_process_tree", utils.kill_process_tree)  # restored after the test
    (child,) = children(psutil.Process(process.pid))
    engine: Any = SimpleNamespace(
        pid=process.pid, name="EngineCore", is_alive=lambda: process.poll() is None, terminate=lambda: None
    )
    with pytest.raises(psutil.NoSuchProcess):  # if not, vLLM has fixed this, and `patch_shutdown` is obsolete
        utils.shutdown([engine], timeout=0)
    assert process.poll() is None

    with pytest.raises(UsageError, match="no_such_argument"):
        await AsyncLLMEngine.start({"no_such_argument": 1})
    utils.shutdown([engine], timeout=0)
    assert process.wait() == -signal.SIGKILL
    await end_of(child.pid)


def test_names_of_engine_arguments_are_read_without_importing_vllm() -> None:
    names = compat.engine_arg_names()
    assert {"model", "max_num_seqs", "distributed_executor_backend", "logprobs_mode"} <= set(names)
    assert len(names) == len(set(names)) > 100
