"""Every bundled environment: reference solutions score full marks, noise doesn't."""

from __future__ import annotations

from pathlib import Path

import pytest

import forge_env as fe
from forge_env.registry import environment_class

BUNDLED = [e.name for e in fe.list_environments() if e.target.startswith("environments.") and not e.needs]
SETTINGS = {"num_tasks": 6, "sandbox": "local", "max_samples": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
def test_gold_scores_full_marks_and_random_does_not(name: str, tmp_path: Path) -> None:
    cls = environment_class(name)
    gold = fe.evaluate(name, "gold", out=tmp_path / "gold", **SETTINGS)
    score = gold.summary.environments[name].score
    assert gold.summary.status == "complete"
    seats = getattr(cls, "seats", ())
    assert score.value == pytest.approx(cls.max_reward / max(1, len(seats))), "of several seats one wins"
    if seats:  # who plays at random against itself wins as often; its tests have players against each other
        return
    noise = fe.evaluate(name, "random", out=tmp_path / "random", **SETTINGS)
    score = noise.summary.environments[name].score
    assert noise.summary.status == "complete"
    assert score.value < cls.max_reward
