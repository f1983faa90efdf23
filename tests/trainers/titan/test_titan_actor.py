"""The trainer as an actor over two processes: every verb, and the weights that leave it."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

import torch

from forge_env.config.recipe import ModelSection, OptimizerSection, TinyModel
from forge_env.errors import UsageError
from trainers.actors.remote import agreed, result
from trainers.loop.stack import prepare_controller
from trainers.losses.sft import SFTLoss
from trainers.model.tiny import hf_config

prepare_controller()

from tests.trainers.titan.ranks import VOCABULARY, check_weights, engine, sequences, weights  # noqa: E402
from trainers.titan.trainer import TitanTrainer  # noqa: E402
from trainers.weights import store  # noqa: E402
from trainers.weights.reader import Reader  # noqa: E402

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
SECTION = OptimizerSection(lr=1e-3, warmup_steps=0, decay_start=1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    shape = TinyModel(layers=2, dim=64, heads=2, kv_heads=2, hidden_dim=96, vocab_size=VOCABULARY)
    (path / "config.json").write_text(json.dumps(hf_config(ModelSection(tiny=shape), VOCABULARY, 2)))
    return path


def rows() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    response = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(response)
    return [{"tokens": torch.cat([response.flip(0), response], 1)}], [
        {"response": response, "padding_mask": mask, "advantages": torch.ones(4)}
    ]


async def test_two_processes_are_one_trainer(folder: Path, tmp_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    data, alone = sequences(), engine(folder)
    for _ in range(2):
        alone.train(data, SFTLoss())
    trainer = await TitanTrainer.options(procs=2, mesh_name="trainer").as_actor(
        str(folder), max_length=128, transport="torchstore"
    )
    await store.open_store(trainer._forge_proc_mesh, 2)
    try:
        with pytest.raises(UsageError, match="call `configure` first"):
            await agreed(trainer.train.call(data))
        await result(trainer.configure.call(SECTION, loss=SFTLoss(), steps=20, microbatch_tokens=256))

        # By single verbs as by the whole step.
        await result(trainer.forward_backward.call(sequences(3, seed=9)))
        await result(trainer.clear_gradients.call())
        await result(trainer.forward_backward.call(data))
        status = await agreed(trainer.get_status.call())
        assert status["step"] == 0
        assert status["accumulated_microbatches"] > 0
        await result(trainer.optim_step.call())
        await result(trainer.train.call(data))
        assert await agreed(trainer.get_status.call()) == {"step": 2, "accumulated_microbatches": 0}

        reader = Reader()
        first, second = [await agreed(trainer.push_weights.call(version)) for version in (1, 2)]
        assert len(first.layouts) == 2, "each process has a part"
        with pytest.raises(FileNotFoundError):
            await reader.take(first)
        check_weights(dict(await reader.take(second)), weights(alone))
        assert await reader.find(2) == second
        with pytest.raises(FileNotFoundError):
            await reader.find(1)

        await result(trainer.save.call(str(tmp_path / "checkpoint")))
        loss = await agreed(trainer.train_step.call(*rows()))
        assert isinstance(loss, float)
        assert (await agreed(trainer.get_status.call()))["step"] == 3
        await result(trainer.load.call(str(tmp_path / "checkpoint")))
        assert (await agreed(trainer.get_status.call()))["step"] == 2
        assert await agreed(trainer.train_step.call(*rows())) == pytest.approx(loss, rel=1e-6)

        config = await agreed(trainer.get_config.call())
        assert config["model_name"] == str(folder)
        assert config["model_config"]["vocab_size"] == VOCABULARY
        assert config["parallelism"]["data_parallel_shard_degree"] == 2
        await result(trainer.cleanup.call())
    finally:
        await TitanTrainer.shutdown(trainer)
        await store.close_store()
    left = {process.pid for process in psutil.Process().children(recursive=True)} - before
    assert not [pid for pid in left if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
