"""Every GPU recipe at its real size and parallel layout: it runs forward and backward within the planned memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from unittest.mock import patch

from forge_env.config import load_config
from forge_env.config.finding import bundled_recipes
from tests.trainers.plan.unreal import first_rank, peak_bytes, sequences
from trainers.plan import memory
from trainers.plan.memory import Layout, trainer_memory
from trainers.plan.shape import Shape, model_config

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
RECIPES = [name for name in bundled_recipes() if load_config(name).trainer.with_gpus]
WITHIN = 0.10
MORE = [
    ("grpo/qwen3_8b", "trainer.procs=8", "trainer.parallelism.tensor_parallel_degree=4"),
    ("grpo/llama3_8b", "trainer.procs=8", "trainer.parallelism.context_parallel_degree=2"),
]
"""Layouts that no recipe has."""
CORE = ("coding_rlvr/qwen3_0_6b", "grpo/qwen3_8b", "grpo/qwen3_30b_a3b")
CASES = [
    *(pytest.param((name,), id=name, marks=[pytest.mark.core] * (name in CORE)) for name in RECIPES),
    *(pytest.param(arguments, id=" ".join(arguments)) for arguments in MORE),
]


@pytest.mark.parametrize("arguments", CASES)
def test_a_recipe_at_its_real_size(arguments: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config(arguments[0], arguments[1:])
    section, data = config.trainer, sequences(config)
    with first_rank(config, tmp_path) as (engine, mode):
        measured = peak_bytes(engine, data, mode)
    layout = Layout.of(
        section.procs,
        section.parallelism,
        recompute=section.activation_checkpoint,
        dtype=config.model.dtype,
        device="cpu",
    )
    with patch.dict(memory.TILE_BYTES, cpu=memory.TILE_BYTES["cuda"]):
        expected = trainer_memory(
            Shape.of(model_config(config.model), config.model.path),
            layout,
            section.optimizer,
            tokens=sum(len(segment.token_ids) for segment in data),
            targets=sum(int(segment.mask.sum()) for segment in data),
            grid=1.0,
        )
    assert expected.peak == pytest.approx(measured, rel=WITHIN), {
        name: round(size / memory.GIB, 2) for name, size in expected.parts.items()
    } | {"measured": round(measured / memory.GIB, 2)}
