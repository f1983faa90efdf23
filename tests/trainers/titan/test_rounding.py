"""What rounding leaves of trained changes is measured as the generators will compute it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from forge_env.config.recipe import LoRASection, OptimizerSection
from forge_env.trajectory import Segment
from tests.trainers.model.checkpoints import VOCABULARY, write_checkpoint
from trainers.losses.sft import SFTLoss
from trainers.model.rounding import Change
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.model import TitanModel

pytestmark = [pytest.mark.stack, pytest.mark.slow]
TOKENS = torch.randint(0, VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(0))
SEQUENCES = [Segment(row, np.arange(len(row)) > 0) for row in TOKENS.numpy()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16, as most are."""
    folder = write_checkpoint("Llama 3.2", tmp_path_factory.mktemp("base") / "model")
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("lora", [None, LoRASection()])
@pytest.mark.parametrize(("lr", "low", "high"), [(1e-7, 0.0, 0.1), (3e-2, 0.9, 1.1)])
def test_small_rates_lose_changes(base: Path, lora: LoRASection | None, lr: float, low: float, high: float) -> None:
    device = use_device(with_gpus=False)
    model = TitanModel(base, max_length=64, device=device.torch, lora=lora, dtype="bfloat16")
    section = OptimizerSection(lr=lr, warmup_steps=0)
    engine = TitanEngine(model, section, device=device, steps=10, microbatch_tokens=256)
    kept = [engine.train(SEQUENCES, SFTLoss())["change_kept"] for _ in range(2)]
    assert low <= kept[-1] <= high, kept


def test_the_share_is_that_of_all_weights(base: Path) -> None:
    device = use_device(with_gpus=False)
    model = TitanModel(base, max_length=64, device=device.torch, dtype="bfloat16")
    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    engine = TitanEngine(model, OptimizerSection(lr=3e-4), device=device, steps=10, microbatch_tokens=256)
    kept = engine.train(SEQUENCES, SFTLoss())["change_kept"]
    change = Change()
    for old, new in zip(before, model.module.parameters(), strict=True):
        change.add(old, new.detach(), torch.bfloat16)
    assert 0 < change.reverted < change.changed
    assert kept == pytest.approx(change.share, abs=0.05)
