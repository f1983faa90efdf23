"""Every example of docs/algorithms.md works as it stands, and the page names everything that comes with forge-env."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from forge_env.environment import Environment
from forge_env.plugins import installed
from forge_env.registry import make
from tests.trainers.algorithms.test_parts import episode
from trainers.algorithms.parts import Group, learned, token_advantages

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text()


def examples() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, names)
    return names


@pytest.mark.slow
def test_the_examples_work() -> None:
    names = examples()
    group = Group([episode(1.0, (1, 2), terminated=True), episode(0.0, (1,))])
    weights = token_advantages(names["LateTurns"](), group)
    assert [values.tolist() for values in weights] == [[0.25, 0.5, 0.5], [-0.5]]
    assert names["NotAllTruncated"]()(group)
    assert learned(names["FirstTurns"]()(group.episodes[0]), group.episodes[0]).tolist() == [True, False, False]
    environment: Environment = make("coding_rlvr", levels=[1, 2])
    order = names["EasyFirst"](environment, "train", seed=0)
    assert [environment.task("train", order[position]).difficulty for position in (0, 400)] == [1, 1]


def test_everything_that_comes_with_it_is_named() -> None:
    for group in ("advantages", "masks", "group_filters"):
        assert [name for name in installed(f"forge_env.{group}") if f"`{name}`" not in PAGE] == []
