"""Processes that are killed or interrupted lose no finished sample."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_env.evaluation.comparison import load
from forge_env.trajectory import read_trajectories
from tests.forge_env.endpoint.server import Server, completion
from tests.forge_env.evaluation.toys import model_answer

TOY = "tests.forge_env.evaluation.toys:Sums"
COMMAND = [sys.executable, "-m", "forge_env", "eval"]
ROOT = Path(__file__).parents[3]
SAMPLES = 480
MANY = ("--epochs", str(SAMPLES // 12))
"""More samples than twenty rounds can finish, each of four requests and what a few milliseconds allow."""


def behave(request: dict[str, Any], n: int) -> Any:
    return completion(model_answer(request["messages"][-1]["content"], request["seed"]))


async def start(out: Path, url: str, *more: str) -> asyncio.subprocess.Process:
    flags = ["--model", "m", "--base-url", url, "--epochs", "5", "--send-seed", "true", "--out", str(out)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*COMMAND, TOY, *flags, *more, cwd=ROOT, stdout=pipe, stderr=pipe)


def results(out: Path) -> dict[str, tuple[bool, float, str]]:
    samples = load(out).results
    texts = {item.id: item.turns[-1].message.content for item in read_trajectories(out / "trajectories" / "eval.jsonl")}
    return {sample.id: (sample.valid, sample.score, texts[sample.id]) for sample in samples}


class Killer:
    """An endpoint that kills its caller at some request, or some milliseconds after: while it writes, sums up, ends."""

    def __init__(self, kills: int, seed: int) -> None:
        self.left = kills
        self.rng = random.Random(seed)
        self.victim: asyncio.subprocess.Process | None = None
        self.countdown = 0

    def arm(self) -> None:
        self.countdown = self.rng.randrange(1, 5)

    async def __call__(self, request: dict[str, Any], n: int) -> Any:
        self.countdown -= 1
        if self.countdown == 0 and self.left and (process := self.victim) is not None:
            asyncio.get_running_loop().call_later(self.rng.choice([0.0, 0.001, 0.003, 0.01]), self._kill, process)
            await process.wait() if self.rng.random() < 0.3 else None  # killed with the answer, or without
        return behave(request, n)

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_twenty_kills_and_resumes_equal_an_undisturbed_run(tmp_path: Path) -> None:
    async with Server(behave) as server:
        whole = await start(tmp_path / "whole", server.url, *MANY)
        _, errors = await whole.communicate()
        assert whole.returncode == 0, errors.decode()

    out, kills = tmp_path / "killed", 0
    killer = Killer(20, seed=0)
    async with Server(killer) as server:
        while True:
            killer.arm()
            resume = ["--resume"] if (out / "config.yaml").exists() else []
            few = ["--start-concurrency", "2", "--concurrency", "2"]
            killer.victim = victim = await start(out, server.url, *few, *MANY, *resume)
            _, errors = await victim.communicate()
            if victim.returncode != -signal.SIGKILL:
                break
            kills, killer.left = kills + 1, killer.left - 1
    assert (victim.returncode, kills) == (0, 20), errors.decode()
    assert results(out) == results(tmp_path / "whole")
    assert figures(out) == figures(tmp_path / "whole")
    stored = [trajectory.id for trajectory in read_trajectories(out / "trajectories" / "eval.jsonl")]
    assert len(stored) == len(set(stored)) == SAMPLES  # nothing was played twice that had finished
    assert len(server.requests) <= SAMPLES + 20 * 4  # a kill costs what was under way, four at most


def figures(out: Path) -> dict[str, Any]:
    """The summary without what a clock says."""
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    timed = {"wall_s", "waited_s", "generate_s", "step_s", "reset_s", "close_s", "requests"}
    environments = {
        label: {name: value for name, value in item.items() if name not in timed}
        for label, item in summary["environments"].items()
    }
    return {"status": summary["status"], "environments": environments}
