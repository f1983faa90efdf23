"""Defaults of `with_gpus` and `share_gpus`, which depend on the GPUs of this machine."""

from __future__ import annotations

from typing import Any

import pytest

from forge_env import machine
from forge_env.config import RunConfig, load_config
from forge_env.errors import ForgeError
from forge_env.run.preflight import check_gpus

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
        ("cuda", 1, {"method": "sft"}, (False, True, False)),
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


def test_a_recipe_file_that_sets_other_keys_of_a_section_uses_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [GPU])
    config = load_config("coding_rlvr.yaml", ["generator.kv_cache_gb=4"])
    assert (config.generator.with_gpus, config.trainer.with_gpus, config.job.share_gpus) == (True, True, True)
    assert load_config("coding_rlvr.yaml", ["generator.with_gpus=false"]).generator.with_gpus is False


@pytest.mark.parametrize(
    ("grpo", "threads"),
    [
        ({}, 1),
        ({"reference": {"source": "initial"}}, 4),
        ({"reference": {"source": "initial", "with_gpus": True}}, 1),
        ({"reference": {"source": "initial", "procs": 2}}, 1),
    ],
)
def test_threads_of_a_recipe_for_cpus_are_kept_for_a_reference_model_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, grpo: dict[str, Any], threads: int
) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [GPU])
    recipe = {"environment": {"name": "coding_rlvr"}, "trainer": {"threads": 4}, "grpo": grpo}
    assert RunConfig.model_validate(recipe).trainer.threads == threads


@pytest.mark.parametrize("count", [0, 1])
def test_vllm_for_gpus_is_not_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [GPU] * count)
    config = RunConfig.model_validate({"environment": {"name": "coding_rlvr"}, **BOTH})
    with pytest.raises(ForgeError, match="can't generate on the CPU") as caught:
        check_gpus(config)
    assert "STACK=cpu" in str(caught.value.fix)
    check_gpus(config.model_copy(update={"method": "sft"}))  # training without a generator can
