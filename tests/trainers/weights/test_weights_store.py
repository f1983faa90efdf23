"""The weight store as the run sees it, in a real process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.trainers.actors.signals import stop
from trainers.actors.processes import survive_deaths
from trainers.weights.store import Keeper, WeightStore

pytestmark = [pytest.mark.stack, pytest.mark.timeout(120)]


async def test_a_store_whose_process_is_stopped_is_left_behind() -> None:
    survive_deaths()
    weights = {"layer": torch.arange(6.0)}
    stopped = await Keeper.as_actor()
    store = WeightStore()
    await store.open(stopped)
    await store.push(weights, 1)
    (pid,) = stopped._forge_pids
    stop(pid)
    async with asyncio.timeout(60):
        await store.close()
    os.kill(pid, signal.SIGKILL)

    another = await Keeper.as_actor()
    try:
        store = WeightStore()
        await store.open(another)
        assert await store.versions() == set()
        await store.push(weights, 2)
        assert torch.equal(dict(await WeightStore().pull(2))["layer"], weights["layer"])
    finally:
        await store.close()
        await Keeper.shutdown(another)


def test_the_process_of_a_store_loads_no_more_than_the_store() -> None:
    """It starts in each run, and torch takes two seconds of it already."""
    heavy = {"forge_env.config", "pydantic", "torch._dynamo", "torch._inductor", "torchtitan", "transformers", "vllm"}
    code = f"import sys, trainers.weights.store; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
