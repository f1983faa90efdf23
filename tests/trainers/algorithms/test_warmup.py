"""`method: warmup`: demonstrations in, a checkpoint folder out; and the checkpoint that comes with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from safetensors import safe_open

from forge_env.config import load_config
from forge_env.config.finding import bundled_models, checkpoint_folder
from forge_env.errors import UsageError
from forge_env.run import Run, RunFolder
from forge_env.run.metrics import open_loggers, read_metrics
from tests.trainers.buffer import virtual_time
from tests.trainers.loop.dry_run import make_config, stand_ins
from tests.trainers.loop.stand_ins import STAND_INS, Trace
from trainers.algorithms.warmup import train
from trainers.model.folder import check_folder

pytestmark = pytest.mark.stack
ALONE = {"method": "warmup", "warmup.steps": 3}


def warm_up(root: Path, **overrides: object) -> tuple[Run, Trace]:
    config = make_config({**ALONE, **overrides}, root)
    folder, trace = RunFolder(root / "runs" / "base"), Trace(root)
    folder.create()
    run = Run(config, folder, loggers=open_loggers(config, folder, lambda: 0.0))
    try:
        with stand_ins(trace, STAND_INS):
            virtual_time.run(train(run))
    finally:
        run.close()
        folder.release()
    return run, trace


def test_it_starts_a_trainer_only_and_leaves_a_model(tmp_path: Path) -> None:
    run, trace = warm_up(tmp_path)
    assert [name for _, what, name in trace.events if what == "launch"] == [trace.events[0][2]]
    assert "trainer" in trace.events[0][2]
    assert [what for _, what, _ in trace.events].count("trainer.train") == 3
    assert (run.folder.root / "model" / "model.safetensors").is_file()
    assert [row["step"] for row in read_metrics(run.folder.metrics) if "warmup/loss" in row] == [1, 2, 3]


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    first, _ = warm_up(tmp_path)
    model = first.folder.root / "model"
    model.rename(tmp_path / "first")
    _, trace = warm_up(tmp_path, **{"model.path": str(tmp_path / "first")})
    assert "first" in trace.events[0][2]


def test_without_steps_there_is_nothing_to_do() -> None:
    with pytest.raises(UsageError, match="the recipe has no warm-up"):
        train.check(load_config("coding_rlvr/base", ["warmup.steps=0"]))


def test_adapters_make_no_whole_model() -> None:
    with pytest.raises(UsageError, match=r"method=warmup trains a whole model, and lora trains adapters only"):
        train.check(load_config("coding_rlvr/base", ["lora={}"]))


def test_the_bundled_checkpoint_is_whole_small_and_that_of_its_recipe() -> None:
    assert set(bundled_models()) == {"coding_rlvr_base"}
    folder = checkpoint_folder("coding_rlvr_base")
    made, used = load_config("coding_rlvr/base"), load_config("coding_rlvr")
    check_folder(folder, used.model.max_length)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4_000_000
    shape, config = made.model.tiny, json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (shape.layers, shape.dim)
    assert config["max_position_embeddings"] == made.model.max_length == used.model.max_length
    assert made.environment.options["levels"] == used.environment.options["levels"]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 - no mapping


def test_users_folder_goes_before_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folder("coding_rlvr_base") == bundled_models()["coding_rlvr_base"]
    (tmp_path / "coding_rlvr_base").mkdir()
    assert checkpoint_folder("coding_rlvr_base") == Path("coding_rlvr_base")
    assert checkpoint_folder("Qwen/Qwen3-0.6B") is None
