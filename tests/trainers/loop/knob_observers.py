"""What the libraries behind the actors make of a recipe: TorchTitan's model as it is built, vLLM's configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from forge_env.config.recipe import ModelSection
from tests.trainers.loop.dry_run import make_config
from tests.trainers.titan.ranks import VOCABULARY
from trainers.generator.arguments import engine_arguments
from trainers.model.tiny import hf_config
from trainers.titan.device import use_device
from trainers.titan.model import TitanModel
from trainers.titan.parallel import Sharding

VLLM = """
import json, os, sys
from trainers.generator.arguments import prepare_process

for line in sys.stdin:
    arguments, process = json.loads(line)
    prepare_process(**process)
    import torch
    from vllm import EngineArgs

    config = EngineArgs(skip_tokenizer_init=True, **arguments).create_engine_config()
    model, cache = config.model_config, config.cache_config
    print("resolved", json.dumps([
        str(model.dtype), model.max_model_len, model.enforce_eager, model.seed,
        config.scheduler_config.max_num_seqs, cache.enable_prefix_caching,
        cache.gpu_memory_utilization, config.parallel_config.tensor_parallel_size,
        torch.get_num_threads(), os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None),
    ]), flush=True)
"""


def small_model(folder: Path, section: ModelSection) -> Path:
    """A folder with the configuration of a recipe's tiny model and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(section, VOCABULARY, 2)))
    return folder


def titan(overrides: Mapping[str, Any], root: Path) -> Any:
    """TorchTitan's model: its modules, its longest row, and the precision of what it computes."""
    import torch

    config = make_config(overrides, root)
    section = config.trainer
    model = TitanModel(
        small_model(root / "shape", config.model),
        max_length=config.model.max_length,
        device=use_device(with_gpus=False).torch,
        dtype=config.model.dtype,
        sharding=Sharding(section.parallelism, section.activation_checkpoint, section.compile),
    )
    module, precisions = model.module, []

    def forward(*_: Any) -> None:
        precisions.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)

    model.module = forward
    model.score(MagicMock())
    buffers = {name: (tuple(tensor.shape), float(tensor.abs().sum())) for name, tensor in module.named_buffers()}
    compiled = [block._compiled_call_impl is not None for block in module.layers.values()]
    return str(module), str(precisions), buffers, compiled


class VLLMProcess:
    """vLLM's own resolved configuration, as a generator's process resolves it; importing it takes long, so once."""

    def __init__(self) -> None:
        self._processes: dict[bool, subprocess.Popen[str]] = {}

    def __call__(self, overrides: Mapping[str, Any], root: Path) -> Any:
        config = make_config(overrides, root)
        section = config.generator
        folder = small_model(root / "shape", config.model)
        own = section.model_dump(include={"with_gpus", "threads", "kv_cache_gb"})
        process = self._processes.get(section.with_gpus) or self._start(section.with_gpus)
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps([engine_arguments(config, folder), own]) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            said, _, resolved = line.partition(" ")
            if said == "resolved":
                return json.loads(resolved)
        del self._processes[section.with_gpus]
        raise AssertionError("vLLM refused it: see above")

    def _start(self, with_gpus: bool) -> subprocess.Popen[str]:
        process = self._processes[with_gpus] = subprocess.Popen(
            [sys.executable, "-c", VLLM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return process

    def close(self) -> None:
        for process in self._processes.values():
            process.communicate()


vllm = VLLMProcess()
