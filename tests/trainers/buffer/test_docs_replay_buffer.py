"""The programs of docs/replay_buffer.md run as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from forge_env.config import RunConfig
from forge_env.config.reader import build, parse
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.buffer.rules import make_rules
from trainers.buffer.types import Held

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "replay_buffer.md").read_text()


def test_the_recipe_is_valid() -> None:
    (recipe,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
    config = build(RunConfig, parse("environment: {name: coding_rlvr}\n" + recipe, "page.yaml"))
    make_rules(config.grpo.replay)
    assert config.grpo.filter.name == "with_signal"


async def test_the_programs_work() -> None:
    rule, loop = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    names: dict[str, Any] = {}
    exec(rule + loop, names)
    assert names["ShortestFirst"]()(Held(0, 0, 7, 0.0, None), None) == 7
    version = 0
    trained: list[int] = []

    async def roll_out(index: int) -> tuple[list[Trajectory], list[Any]]:
        turn = Turn([], Reply(Message(role="assistant"), [1], [2, index], [-0.1, -0.2], [version] * 2))
        advantages = [np.full(2, sign, np.float32) for sign in (0.5, -0.5)]
        return [Trajectory("e", "env", f"task-{index}", turns=[turn])] * 2, advantages

    async def train(segments: list[Any]) -> None:
        trained.extend(int(segment.token_ids[-1]) for segment in segments)

    async def update_generators(new: int) -> None:
        nonlocal version
        version = new

    stats = await names["loop"](roll_out, train, update_generators)
    assert trained == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (stats.trained, stats.tokens_discarded_stale) == (6, 0)
    assert stats.max_staleness <= 1
