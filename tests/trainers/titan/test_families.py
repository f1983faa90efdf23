"""Every model family: `transformers` computes the same, from the files it wrote and from those that we write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torchtitan.models import llama3, qwen3

from forge_env.config.recipe import OptimizerSection
from forge_env.trajectory import Segment
from tests.trainers.model.checkpoints import CHECKPOINTS, VOCABULARY, their_logprobs, write_checkpoint
from trainers.losses.sft import SFTLoss
from trainers.model.folder import INDEX
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.families import FAMILIES, titan_config
from trainers.titan.model import TitanModel

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
    trained.train(SEQUENCES, SFTLoss())
    after = np.stack(trained.logprobs(SEQUENCES))
    assert abs(after - before).max() > 0.1
    trained.model.save_hf(tmp_path / "ours")
    assert abs(after - their_logprobs(tmp_path / "ours", TOKENS).numpy()).max() <= MISMATCH
    assert np.array_equal(np.stack(engine(tmp_path / "ours").logprobs(SEQUENCES)), after)


def test_only_experts_that_a_token_is_sent_to_count_as_work(tmp_path: Path) -> None:
    model = engine(write_checkpoint("Qwen 3 MoE", tmp_path)).model
    expert = 3 * 64 * 32
    assert sum(p.numel() for p in model.module.parameters()) - 2 * VOCABULARY * 64 == (
        model.layer_parameters + 2 * (8 - 2) * expert
    )


QWEN_30B = {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "vocab_size": 151936, "head_dim": 128}
QWEN_30B |= {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
QWEN_30B |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
LLAMA_8B = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 128256, "head_dim": 128}
LLAMA_8B |= {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("registered", "hf"),
    [(llama3.model_registry("8B"), LLAMA_8B), (qwen3.model_registry("30B-A3B"), QWEN_30B)],
    ids=["Llama 3.1 8B", "Qwen3 30B-A3B"],
)
def test_a_published_model_has_the_weights_of_torchtitan_s_registry(registered: object, hf: dict[str, object]) -> None:
    def shapes(config: object) -> dict[str, torch.Size]:
        with torch.device("meta"):
            state = config.build().state_dict()  # type: ignore[attr-defined]
        return {name: tensor.shape for name, tensor in state.items() if "expert_bias" not in name}

    ours = titan_config(hf, 64)
    assert isinstance(ours, FAMILIES[str(hf["model_type"])].model.Config)
    assert shapes(ours) == shapes(registered.model)  # type: ignore[attr-defined]
