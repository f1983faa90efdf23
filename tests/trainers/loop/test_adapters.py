"""A recipe with adapters: who is started, with what, and who is asked for the policy before RL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forge_env.config import load_config
from forge_env.job.needs import needed_memory
from forge_env.job.plan import units
from forge_env.run.preflight import needed_disk_gb
from trainers.loop.stack import prepare_controller

prepare_controller()

from tests.trainers.loop.dry_run import dry_run  # noqa: E402
from tests.trainers.loop.knobs import ADAPTED, WARM  # noqa: E402

pytestmark = pytest.mark.stack
INITIAL: dict[str, Any] = {"grpo.reference.source": "initial"}


def calls(overrides: dict[str, Any], root: Path) -> list[str]:
    events = dry_run(overrides, root)
    assert not {"failed", "refused"} & {what for _, what, _ in events}, events[-1]
    return [f"{what} {details}" for _, what, details in events]


def test_the_trainer_is_started_anew_with_adapters_for_what_the_warm_up_made(tmp_path: Path) -> None:
    seen = [line for line in calls(ADAPTED, tmp_path) if line.startswith(("launch", "trainer.", "shutdown"))]
    launches = [number for number, line in enumerate(seen) if line.startswith("launch ['trainer'")]
    saved = next(number for number, line in enumerate(seen) if line.startswith("trainer.save_model"))
    assert len(launches) == 2
    assert launches[0] < saved < launches[1]
    assert "'lora': None" in seen[launches[0]]
    assert "'lora': {'rank': 8" in seen[launches[1]]
    assert sum(line.startswith("launch ['trainer'") for line in calls(WARM, tmp_path)) == 1


def test_the_policy_before_rl_is_the_trainer_s_own_without_adapters(tmp_path: Path) -> None:
    seen = calls({**ADAPTED, **INITIAL}, tmp_path)
    assert not any(line.startswith("launch ['reference'") for line in seen)
    order = [line.split()[0] for line in seen if line.startswith(("trainer.score_base", "trainer.train_on"))]
    assert order == ["trainer.score_base", "trainer.train_on"] * 5
    assert any(line.startswith("launch ['reference'") for line in calls({**WARM, **INITIAL}, tmp_path))


def test_nothing_is_reckoned_with_for_a_model_that_the_trainer_has() -> None:
    def roles(*overrides: str) -> set[str]:
        config = load_config("coding_rlvr", overrides)
        return {*needed_memory(config), *(unit.role for unit in units(config))}

    assert "reference" in roles("grpo.reference.source=initial")
    assert "reference" not in roles("grpo.reference.source=initial", "lora={}")
    assert "reference" in roles("grpo.reference={source: lagging, every: 2}", "lora={}")


def test_adapters_take_less_memory_and_disk() -> None:
    whole, adapted = (load_config("coding_rlvr", overrides) for overrides in ([], ["lora={}"]))
    assert needed_memory(adapted)["trainer"] < needed_memory(whole)["trainer"]
    assert needed_disk_gb(adapted) < needed_disk_gb(whole)
