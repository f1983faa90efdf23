"""Every model family: `transformers` computes the same, from the files it wrote and from those that we write."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file
from torchtitan.models import llama3, qwen3

from forge_env.config.recipe import OptimizerSection
from forge_env.errors import UsageError
from forge_env.trajectory import Segment
from tests.trainers.model.checkpoints import CHECKPOINTS, VOCABULARY, their_logprobs, write_checkpoint
from trainers.losses.sft import SFTLoss
from trainers.model.export import read_weights
from trainers.model.folder import INDEX
from trainers.plan.shape import Shape, hub_config, published
from trainers.titan import batch
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.families import FAMILIES, tensor_shapes, titan_config
from trainers.titan.model import TitanModel, check_weights
from trainers.titan.optimizer import build_optimizer

pytestmark = [pytest.mark.stack, pytest.mark.slow]
MISMATCH = 1e-5
TOKENS = torch.randint(0, VOCABULARY, (3, 120), generator=torch.Generator().manual_seed(0))
SEQUENCES = [Segment(row, np.arange(len(row)) > 0) for row in TOKENS.numpy()]


def engine(folder: Path) -> TitanEngine:
    device = use_device(with_gpus=False)
    model = TitanModel(folder, max_length=128, device=device.torch)
    section = OptimizerSection(lr=1e-2, warmup_steps=0)
    return TitanEngine(model, section, device=device, steps=10, microbatch_tokens=256)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_scores_are_those_of_transformers_as_loaded_and_as_saved_after_training(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path / "theirs", shards=True)
    assert (folder / INDEX).is_file()
    (folder / "consolidated.safetensors").write_bytes(b"another copy, which the index does not name")
    trained = engine(folder)
    before = np.stack(trained.logprobs(SEQUENCES))
    assert abs(before - their_logprobs(folder, TOKENS).numpy()).max() <= MISMATCH
    trained.model.save_hf(tmp_path / "again")
    theirs, again = read_weights(folder), read_weights(tmp_path / "again")
    assert theirs.keys() == again.keys()
    assert all(torch.equal(theirs[key], again[key]) for key in theirs)
    trained.train(SEQUENCES, SFTLoss())
    after = np.stack(trained.logprobs(SEQUENCES))
    assert abs(after - before).max() > 0.1
    trained.model.save_hf(tmp_path / "ours")
    assert abs(after - their_logprobs(tmp_path / "ours", TOKENS).numpy()).max() <= MISMATCH
    assert np.array_equal(np.stack(engine(tmp_path / "ours").logprobs(SEQUENCES)), after)


def test_weights_of_shared_keys_and_values_are_ignored(tmp_path: Path) -> None:
    """As in the hub's files of Gemma 4 E2B."""
    folder = write_checkpoint("Gemma 4 E2B", tmp_path)
    expected, file = engine(folder).logprobs(SEQUENCES), folder / "model.safetensors"
    shapes = {"k_proj": (64, 64), "v_proj": (64, 64), "k_norm": (32,)}
    names = {f"model.layers.3.self_attn.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    save_file(load_file(file) | names, file, {"format": "pt"})
    check_weights(folder)
    assert np.array_equal(engine(folder).logprobs(SEQUENCES)[0], expected[0])
    save_file(load_file(file) | {"model.layers.0.self_attn.v_norm.weight": torch.ones(32)}, file, {"format": "pt"})
    with pytest.raises(UsageError, match=r"has model.layers.0.self_attn.v_norm.weight, which a 'gemma4_text'"):
        check_weights(folder)


def test_only_experts_that_a_token_is_sent_to_count_as_work(tmp_path: Path) -> None:
    model = engine(write_checkpoint("Qwen 3 MoE", tmp_path)).model
    expert = 3 * 64 * 32
    assert sum(p.numel() for p in model.module.parameters()) - 2 * VOCABULARY * 64 == (
        model.layer_parameters + 2 * (8 - 2) * expert
    )


@pytest.mark.parametrize(("name", "sinks"), [("gpt-oss", True), ("Gemma 4", False)])
def test_rows_are_padded_for_attention_sinks(
    name: str, sinks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(batch, "layout_of", lambda *_, padded: asked.append(padded))
    engine(write_checkpoint(name, tmp_path)).collate([0], SEQUENCES)
    assert asked == [sinks]


@pytest.mark.parametrize("muon_lr", [0.0, 1e-2])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weight_decay_shrinks_matrices_and_nothing_else(name: str, muon_lr: float, tmp_path: Path) -> None:
    device = use_device(with_gpus=False)
    module: Any = TitanModel(write_checkpoint(name, tmp_path), max_length=128, device=device.torch).module
    section = OptimizerSection(lr=1e-2, muon_lr=muon_lr, weight_decay=0.5)
    optimizer = build_optimizer(module, section, device)
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    before = {}
    for key, parameter in module.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        before[key] = parameter.detach().clone()
    optimizer.step()
    for key, parameter in module.named_parameters():
        shrinks = parameter.dim() > 1 and id(parameter) not in embeddings and not key.endswith("bias")
        expected = before[key] * (1 - 1e-2 * 0.5) if shrinks else before[key]
        assert torch.allclose(parameter, expected, rtol=1e-6, atol=0), key


@pytest.mark.parametrize("name", [name for name in published() if re.search("Qwen3.5|Phi-|gemma|gpt-oss", name)])
def test_a_published_size_is_what_is_built(name: str) -> None:
    hf = hub_config(name)
    assert Shape.of(hf, name).parameters == sum(prod(shape) for shape in tensor_shapes(hf).values())


OTHER_BASE = "Qwen/Qwen3-235B-A22B"
"""TorchTitan has the rotary base of its later release (2507); the first one's is that of all Qwen 3."""


def registered(name: str) -> Any:
    """TorchTitan's own config of a published model."""
    family, size = re.fullmatch(r".*/(Qwen3|Llama-3\.[12])-(.*?)(?:-Base|-Instruct)?", name).groups()
    return (qwen3 if family == "Qwen3" else llama3).model_registry(size).model


@pytest.mark.parametrize(
    "name", [name for name in published() if re.search(r"/(Qwen3|Llama-3\.[12])-(?!.*(?:2507|Coder))", name)]
)
def test_a_published_model_is_that_of_torchtitan_s_registry(name: str) -> None:
    def shapes(config: Any) -> dict[str, torch.Size]:
        with torch.device("meta"):
            state = config.build().state_dict()
        return {name: tensor.shape for name, tensor in state.items() if "expert_bias" not in name}

    hf = hub_config(name)
    theirs, ours = registered(name), titan_config(hf, hf["max_position_embeddings"])
    assert isinstance(ours, FAMILIES[str(hf["model_type"])].model.Config)
    assert shapes(ours) == shapes(theirs)
    assert ours.enable_weight_tying == theirs.enable_weight_tying
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        assert own.attention_norm.eps == other.attention_norm.eps == ours.norm.eps == theirs.norm.eps
        rope = other.attention.rope
        if name == OTHER_BASE:
            assert (own.attention.rope.theta, rope.theta) == (1e6, 5e6)
            rope = replace(rope, theta=1e6)
        elif "/Llama-3.2-" in name:
            assert (own.attention.rope.scaling_factor, rope.scaling_factor) == (32.0, 8.0), "TorchTitan has Llama 3.1's"
            rope = replace(rope, scaling_factor=32.0)
        assert own.attention.rope == rope, "base, scaling and longest row"
        assert own.attention.n_heads == other.attention.n_heads
        assert (own.moe is None) == (other.moe is None)
        if own.moe is not None:
            router, another = own.moe.router, other.moe.router
            assert (router.top_k, router.score_func, router.route_norm) == (
                another.top_k,
                another.score_func,
                another.route_norm,
            )
