"""Both transports of weights, on one host and on two, under the same contract."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

pytest.importorskip("torchstore")

import torchstore

from tests.trainers.actors.workers import workers
from trainers.weights import shared, store
from trainers.weights.reader import Reader

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]

RECIPE = """
environment: {{name: wordle}}
model: {{cache_dir: {folder}/cache}}
trainer: {{procs: 2}}
output_dir: {folder}/runs
job: {{kind: hosts, workers: [{workers}], place: {{trainer: [0], generator: [1]}}}}
"""


def exchange(transport: str, recipe: Sequence[str] = ()) -> None:
    command = [sys.executable, "-m", "tests.trainers.weights.exchange", transport, *recipe]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert "EXCHANGED" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("transport", ["shared", "torchstore"])
def test_weights_arrive_whole_and_dropped_ones_are_refused(transport: str) -> None:
    exchange(transport)


@pytest.mark.parametrize("transport", ["shared", "torchstore"])
def test_weights_arrive_whole_on_another_host(transport: str, tmp_path: Path) -> None:
    with workers(2, tmp_path, "tcp", {}) as hosts:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(RECIPE.format(folder=tmp_path, workers=", ".join(host.address for host in hosts)))
        exchange(transport, [str(recipe)])


async def test_a_lookup_ends_with_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Monarch takes two minutes to report a death; the client here never does."""
    asked = asyncio.Event()

    class Client:
        def __init__(self, pid: int) -> None:
            self.strategy = store.VolumePerRank()
            self.strategy.volume_id_to_coord = {shared.Process(shared.host(), pid, None): {}}

        async def get(self, *_: object) -> None:
            asked.set()
            await asyncio.Event().wait()

    trainer = await asyncio.create_subprocess_exec("sleep", "1000")
    for module in (torchstore, torchstore.api):
        monkeypatch.setattr(module, "client", AsyncMock(return_value=Client(trainer.pid)))
    looking = asyncio.ensure_future(Reader().find(1))
    await asked.wait()
    trainer.kill()
    with pytest.raises(ConnectionError, match="process of the trainer has ended"):
        await asyncio.wait_for(looking, 60)
    await trainer.wait()


def test_shared_memory_needs_no_torchstore() -> None:
    """It is imported in every process that publishes or reads weights, and by two seconds of torch already."""
    heavy = {"forge_env.config", "pydantic", "torch._dynamo", "torchtitan", "transformers", "torchstore", "vllm"}
    code = f"import sys, trainers.weights.transport; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
