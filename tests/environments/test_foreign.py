"""Against the real reasoning_gym, TextArena and MiniGrid: their problems and games are played as ours."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import forge_env as fe
from forge_env.errors import UsageError
from forge_env.validation.checks import Validator

PAGE = Path(__file__).parents[2] / "docs" / "environments" / "interop.md"


async def check(make: Callable[[], fe.Environment]) -> None:
    checks = [check async for check in Validator(make, num_tasks=3).run()]
    assert [check for check in checks if check.status == "failed"] == []


@pytest.mark.parametrize(
    ("dataset", "options"), [("chain_sum", {"max_terms": 3}), ("countdown", {}), ("spell_backward", {})]
)
async def test_datasets_validate(dataset: str, options: dict[str, int]) -> None:
    await check(lambda: fe.make("reasoning_gym", dataset=dataset, options=options))


async def test_its_own_scorer_judges_and_the_splits_differ() -> None:
    env = fe.make("reasoning_gym", dataset="chain_sum", seed=3)
    train, held_out = env.task("train", 5), env.task("eval", 5)
    assert train.prompt != held_out.prompt
    assert fe.make("reasoning_gym", dataset="chain_sum", seed=3).task("train", 5) == train
    assert train.gold is not None
    for answer, expected in [(train.gold, 1.0), ("<answer>x</answer>", 0.0), (re.sub("<.*?>", "", train.gold), 0.0)]:
        await env.reset(options={"task": train})
        assert (await env.step(answer))[1] == expected


def test_what_it_does_not_have_is_said() -> None:
    with pytest.raises(UsageError, match=r"no dataset 'chain_sums'.*did you mean 'chain_sum'"):
        fe.make("reasoning_gym", dataset="chain_sums")
    with pytest.raises(UsageError, match=r"can't make 'chain_sum': .*options of chain_sum: min_terms"):
        fe.make("reasoning_gym", dataset="chain_sum", options={"terms": 3})


async def test_minigrid_plays() -> None:
    env = fe.make("gymnasium", env_id="minigrid:MiniGrid-Empty-5x5-v0")
    try:
        (first, *_), _ = await env.reset(seed=1)
        assert "left, right, forward, pickup, drop, toggle, done" in first.content
        assert first.content.endswith("mission: get to the green goal square")
        reward = 0.0
        for move in ("forward", "forward", "right", "forward", "forward"):
            _, reward, terminated, _, _ = await env.step(f"<action>{move}</action>")
        assert terminated
        assert reward > 0.9
    finally:
        await env.close()


async def test_the_example_validates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"<!-- foreign: guess -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "guess.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        await check(lambda: fe.make("guess:Guess"))
    finally:
        sys.modules.pop("guess", None)
