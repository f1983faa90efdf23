"""Where a recipe says nothing of GPUs, it uses those of this machine."""

from __future__ import annotations

from typing import Any

import pytest

from forge_env import machine
from forge_env.config import RunConfig

GPU = machine.GPU("0", "GPU-0", "NVIDIA H100 80GB HBM3", 80.0)
BOTH = {"generator": {"with_gpus": False}, "trainer": {"with_gpus": False}}


def gpus_of(recipe: dict[str, Any]) -> tuple[bool, bool, bool]:
    config = RunConfig.model_validate({"environment": {"name": "coding_rlvr"}, **recipe})
    return config.generator.with_gpus, config.trainer.with_gpus, config.job.share_gpus


@pytest.mark.parametrize(
    ("build", "count", "recipe", "expected"),
    [
        ("cpu", 1, {}, (False, False, False)),
        ("cuda", 0, {}, (False, False, False)),
        ("cuda", 1, {}, (True, True, True)),
        ("rocm", 1, {}, (True, True, True)),
        ("cuda", 2, {}, (True, True, False)),
        ("cuda", 2, {"generator": {"num_replicas": 2}}, (True, True, True)),
        ("cuda", 1, {"method": "sft"}, (True, True, False)),
        ("cuda", 1, BOTH, (False, False, False)),
        ("cuda", 1, {"trainer": {"with_gpus": False}}, (True, False, False)),
        ("cuda", 1, {"job": {"share_gpus": False}}, (True, True, False)),
        ("cuda", 1, {"job": {"kind": "hosts", "workers": ["tcp://10.0.0.1:26700"]}}, (False, False, False)),
    ],
)
def test_a_recipe_uses_the_gpus_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
    build: str,
    count: int,
    recipe: dict[str, Any],
    expected: tuple[bool, bool, bool],
) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: build)
    monkeypatch.setattr(machine, "gpus", lambda: [GPU] * count)
    assert gpus_of(recipe) == expected
