"""Processes that are killed or interrupted lose no finished sample."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_env.evaluation.comparison import load
from forge_env.trajectory_io import read_trajectories
from tests.evaluation.server import Server, completion
from tests.evaluation.toys import model_answer

TOY = "tests.evaluation.toys:Sums"
COMMAND = [sys.executable, "-c", "import sys; from forge_env.cli.main import main; sys.exit(main())", "eval"]
ROOT = Path(__file__).parents[2]
MANY = ("--epochs", "10")
"""120 samples: more than twenty rounds of at most four requests can finish."""


def behave(request: dict[str, Any], n: int) -> Any:
    return completion(model_answer(request["messages"][-1]["content"], request["seed"]))


async def start(out: Path, url: str, *more: str) -> asyncio.subprocess.Process:
    flags = ["--model", "m", "--base-url", url, "--epochs", "5", "--send-seed", "true", "--out", str(out)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*COMMAND, TOY, *flags, *more, cwd=ROOT, stdout=pipe, stderr=pipe)


def results(out: Path) -> dict[str, tuple[bool, float, str]]:
    _, samples = load(out)
    texts = {item.id: item.turns[-1].message.content for item in read_trajectories(out / "trajectories" / "eval.jsonl")}
    return {sample.id: (sample.valid, sample.score, texts[sample.id]) for sample in samples}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_twenty_kills_and_resumes_equal_an_undisturbed_run(tmp_path: Path) -> None:
    async with Server(behave) as server:
        whole = await start(tmp_path / "whole", server.url, *MANY)
        _, errors = await whole.communicate()
        assert whole.returncode == 0, errors.decode()

    rng = random.Random(0)
    victim: asyncio.subprocess.Process | None = None
    kills, until = 0, 0

    async def killing(request: dict[str, Any], n: int) -> Any:
        nonlocal until
        until -= 1
        if until == 0 and kills < 20 and (process := victim) is not None:
            await asyncio.sleep(rng.choice([0.0, 0.001, 0.01]))
            process.kill()
        return behave(request, n)

    out = tmp_path / "killed"
    async with Server(killing) as server:
        while True:
            until = rng.randrange(1, 5)
            resume = ["--resume"] if (out / "config.yaml").exists() else []
            victim = await start(out, server.url, "--start-concurrency", "2", "--concurrency", "2", *MANY, *resume)
            _, errors = await victim.communicate()
            if victim.returncode != -signal.SIGKILL:
                break
            kills += 1
        assert victim.returncode == 0, errors.decode()
    assert kills == 20
    assert results(out) == results(tmp_path / "whole")
    stored = [trajectory.id for trajectory in read_trajectories(out / "trajectories" / "eval.jsonl")]
    assert len(stored) == len(set(stored)) == 120  # nothing was played twice that had finished
    assert len(server.requests) < 120 + 20 * 4


@pytest.mark.slow
async def test_ctrl_c_once_finishes_what_is_under_way(tmp_path: Path) -> None:
    out = tmp_path / "out"
    child: asyncio.subprocess.Process | None = None

    async def interrupting(request: dict[str, Any], n: int) -> Any:
        if n == 2 and child is not None:
            os.kill(child.pid, signal.SIGINT)
            await asyncio.sleep(0.2)
        return behave(request, n)

    async with Server(interrupting) as server:
        child = await start(out, server.url, "--start-concurrency", "3", "--concurrency", "3")
        _, errors = await child.communicate()
        assert child.returncode == 130, errors.decode()
        assert b"Continue: forge-env eval --out" in errors
        first = results(out)
        assert 3 <= len(first) < 60
        assert all(valid for valid, _, _ in first.values())
        again = await start(out, server.url, "--resume")
        await again.communicate()
        assert again.returncode == 0
    assert len(results(out)) == 60
    assert len(server.requests) == 60
