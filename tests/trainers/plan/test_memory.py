"""The forecast of the trainer's memory against what passes really take, on the CPU and within 10 %."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torchtitan.tools.utils import get_peak_flops

from forge_env.config.recipe import LoRASection, OptimizerSection
from forge_env.trajectory import Segment
from tests.trainers.plan.unreal import peak_bytes
from trainers.model.folder import check_hf_config
from trainers.plan.hardware import GPUS, Gpu
from trainers.plan.memory import Layout, saved_bytes, trainer_memory
from trainers.plan.shape import Shape
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.model import TitanModel
from trainers.titan.parallel import Sharding

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]
WITHIN = 0.10
SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
NARROW = {"hidden_size": 128, "intermediate_size": 512}
"""Fewer operations for as large a share of activations."""
GEMMA = {"model_type": "gemma3_text", "query_pre_attn_scalar": 32, "sliding_window": 128}
GEMMA4 = {"model_type": "gemma4_text", "sliding_window": 128, "global_head_dim": 64, "hidden_size_per_layer_input": 0}
E2B = GEMMA4 | {
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 2048,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
BESIDE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 256}
DELTA = {
    "model_type": "qwen3_5_text",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MOE = {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 256, **EXPERTS}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_operations_of_gpus_are_those_that_torchtitan_knows(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lspci(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("torchtitan.tools.utils.subprocess.run", no_lspci)
    known = get_peak_flops("l40s" if gpu.name == "L40S" else f"a {gpu.name}")
    assert gpu.flops == pytest.approx(known, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "recompute", "dtype", "rank"),
    [
        ({}, "none", "float32", 0),
        ({}, "selective", "float32", 0),
        ({}, "full", "float32", 0),
        (NARROW, "none", "bfloat16", 0),
        (NARROW, "full", "bfloat16", 0),
        ({"vocab_size": 40_000}, "none", "float32", 0),
        ({"vocab_size": 40_000}, "full", "bfloat16", 0),
        ({"num_hidden_layers": 8, "hidden_size": 128}, "none", "float32", 0),
        ({"model_type": "llama", "tie_word_embeddings": False}, "none", "float32", 0),
        ({"model_type": "qwen3_moe", "tie_word_embeddings": False, **EXPERTS}, "none", "float32", 0),
        ({"model_type": "qwen3_moe", "tie_word_embeddings": False, **EXPERTS}, "full", "float32", 0),
        ({"model_type": "phi3", "tie_word_embeddings": False}, "none", "float32", 0),
        (GEMMA, "none", "float32", 0),
        (GEMMA, "full", "float32", 0),
        (GEMMA4, "none", "float32", 0),
        (E2B, "none", "float32", 0),
        (E2B, "full", "float32", 0),
        (GEMMA4 | BESIDE, "none", "float32", 0),
        (DELTA, "none", "float32", 0),
        (DELTA, "full", "float32", 0),
        (DELTA | MOE, "none", "float32", 0),
        ({}, "none", "float32", 8),
        ({"vocab_size": 40_000}, "full", "float32", 8),
        ({"num_hidden_layers": 8, "hidden_size": 128, "tie_word_embeddings": False}, "none", "float32", 32),
    ],
    ids=str,
)
def test_forecast_of_passes(changes: dict[str, Any], recompute: str, dtype: str, rank: int, tmp_path: Path) -> None:
    hf = check_hf_config(SMALL | changes, "a model")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    length, count = (512, 4) if dtype == "float32" else (128, 2)  # some processors compute bfloat16 a hundredth as fast
    prompt = length // 4
    optimizer = OptimizerSection()
    device = use_device(with_gpus=False)
    model = TitanModel(
        tmp_path,
        max_length=length,
        device=device.torch,
        dtype=dtype,
        sharding=Sharding(activation_checkpoint=recompute),
        lora=LoRASection(rank=rank) if rank else None,
    )
    engine = TitanEngine(
        model, optimizer, device=device, steps=10, microbatch_tokens=count * length, share_prefixes=False
    )
    data = [Segment(np.arange(length) % 1000, np.arange(length) >= prompt) for _ in range(count)]
    measured = peak_bytes(engine, data, nullcontext())
    expected = trainer_memory(
        Shape.of(hf, ""),
        Layout(recompute=recompute, dtype=dtype, device="cpu", adapters=7 * rank),
        optimizer,
        tokens=count * length,
        targets=count * (length - prompt),
        grid=1.0,
        trained=model.adapter_parameters or None,
    )
    assert expected.peak == pytest.approx(measured, rel=WITHIN), dict(expected.parts)
    scales = [buffer for name, buffer in model.module.named_buffers() if name.endswith(".scale")]  # of Gemma 4
    weights = {id(tensor): tensor.numel() for tensor in (*model.module.parameters(), *scales)}
    assert expected.parts["weights"] == 4 * (sum(weights.values()) - model.adapter_parameters)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expanded"), [("float32", 64, True), ("bfloat16", 512, True), ("bfloat16", 256, False)]
)
def test_keys_are_expanded_for_memory_efficient_attention_on_gpus(dtype: str, head_dim: int, expanded: bool) -> None:
    grouped = Shape.of(check_hf_config(SMALL | {"head_dim": head_dim}, "a model"), "")
    whole = replace(grouped, kv_heads=grouped.heads)

    def attention(shape: Shape, device: str) -> float:
        return saved_bytes(replace(shape, qk_norm=False), Layout(dtype=dtype, device=device), 512, 1.0, mixture=False)

    assert attention(grouped, "cpu") < attention(whole, "cpu")
    assert (attention(grouped, "cuda") == attention(whole, "cuda")) == expanded


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_copies_of_a_shared_prompt_are_counted(recompute: str, tmp_path: Path) -> None:
    hf = check_hf_config(SMALL, "a model")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    prompt, reply, count = 256, 128, 8
    optimizer, device = OptimizerSection(), use_device(with_gpus=False)
    sharding = Sharding(activation_checkpoint=recompute)
    model = TitanModel(tmp_path, max_length=512, device=device.torch, sharding=sharding)
    engine = TitanEngine(model, optimizer, device=device, steps=10, microbatch_tokens=4096)
    rng = np.random.default_rng(0)
    first, learned = rng.integers(0, 1000, prompt), np.arange(prompt + reply) >= prompt
    data = [Segment(np.concatenate([first, rng.integers(0, 1000, reply)]), learned) for _ in range(count)]
    tokens = prompt + count * reply
    expected = trainer_memory(
        Shape.of(hf, ""),
        Layout(recompute=recompute, device="cpu"),
        optimizer,
        tokens=tokens,
        targets=count * reply,
        grid=1.0,
        copies=count * (prompt + reply) / tokens,
    )
    assert expected.peak == pytest.approx(peak_bytes(engine, data, nullcontext()), rel=WITHIN), dict(expected.parts)
