"""The code of docs/coming_from.md: ours is validated; theirs runs where their package is."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forge_env.config import RunConfig
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy

TEXT = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text()
OURS = dict(re.findall(r"<!-- ours: (\w+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
THEIRS = dict(re.findall(r"<!-- theirs: (\w+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))


def run(name: str, source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": f"coming_from_{name}"}
    exec(compile(source, name, "exec"), names)
    return names


@pytest.mark.parametrize("name", OURS)
async def test_ours_scores_the_right_answer(name: str) -> None:
    cls = run(name, OURS[name])[name]
    assert (await run_episode(cls, GoldPolicy(), seed=3)).reward == 1.0
    wrong = await run_episode(cls, ReplayPolicy(["44"]), seed=3)
    assert (wrong.reward, wrong.terminated) == (0.0, True)


@pytest.mark.parametrize("package", THEIRS)
def test_theirs_is_their_code(package: str) -> None:
    """Where a package is missing, its code is compiled only."""
    source = THEIRS[package]
    if package == "factory":
        names = run(package, source)
        env = names["Sums"]()
        assert env.reset(index=3) == "What is 3 + 40?"
        assert env.add(3, 40) == 43
        assert names["right"]([env]) == [1.0]
        return
    if find_spec(package) is None:
        compile(source, package, "exec")
        return
    names = run(package, source)
    if package == "gymnasium":
        env = names["Sums"]()
        prompt, _ = env.reset(seed=1)
        assert env.step(str(int(prompt.split()[2]) + 40))[1] == 1.0
    if package == "datasets":
        assert names["right"](["43", "x"], answer=["43", "44"]) == [1.0, 0.0]
    if package == "openenv":
        env = names["Sums"]()
        env.reset(seed=3)
        assert env.step(names["Answer"](text="43")).reward == 1.0


def test_every_neighbour_has_its_lines() -> None:
    assert set(THEIRS) == {
        *("verifiers", "verifiers_before", "inspect_ai", "datasets", "factory", "gymnasium", "openenv")
    }
    assert set(OURS) == {"Sums", "SumsWithATool"}


def test_the_recipes_keys_exist() -> None:
    table = TEXT.partition("| `GRPOConfig` | recipe |")[2].partition("\n\n")[0]
    keys = set(re.findall(r"`((?:grpo|trainer|model|job|generator|evaluation|checkpoint|logging)\.[a-z_.]+)", table))
    assert len(keys) > 25
    for key in keys:
        model: Any = RunConfig
        for part in key.split("."):
            if hasattr(model, "model_fields"):  # not the options of a part
                model = model.model_fields[part].annotation
