"""`forge-env export`: what it writes is what the checkpoint computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from forge_env.cli.main import main
from forge_env.config.recipe import LoRASection, OptimizerSection
from forge_env.trajectory import Segment
from tests.trainers.model.checkpoints import VOCABULARY, write_checkpoint
from trainers.losses.sft import SFTLoss
from trainers.model.adapter import CONFIG, FOLDER, WEIGHTS
from trainers.titan.device import use_device
from trainers.titan.engine import TitanEngine
from trainers.titan.model import TitanModel

pytestmark = [pytest.mark.stack, pytest.mark.slow]
TOKENS = torch.randint(0, VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(0))
SEQUENCES = [Segment(row, np.arange(len(row)) > 0) for row in TOKENS.numpy()]


def engine(folder: Path, lora: LoRASection | None = None) -> TitanEngine:
    device = use_device(with_gpus=False)
    model = TitanModel(folder, max_length=64, device=device.torch, lora=lora)
    return TitanEngine(model, OptimizerSection(lr=1e-2), device=device, steps=10, microbatch_tokens=256)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint("Llama 3.2", tmp_path_factory.mktemp("base") / "model")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two checkpoints, the first of which is of all weights."""
    run = tmp_path_factory.mktemp("run")
    for step, lora in ((9, None), (10, LoRASection())):
        trained = engine(base, lora)
        trained.train(SEQUENCES, SFTLoss())
        trained.save(run / "checkpoints" / f"step-{step}")
        (run / "checkpoints" / f"step-{step}" / "checkpoint.json").write_text("{}")
        np.save(run / f"logprobs-{step}.npy", np.stack(trained.logprobs(SEQUENCES)))
    return run


@pytest.mark.parametrize("source", ["", "checkpoints/step-10", "checkpoints/step-9", f"checkpoints/step-10/{FOLDER}"])
def test_a_checkpoint_becomes_a_folder_that_computes_the_same(run: Path, tmp_path: Path, source: str) -> None:
    assert main(["export", str(run / source), str(tmp_path / "out")]) == 0
    expected = np.load(run / f"logprobs-{9 if source.endswith('9') else 10}.npy")
    assert abs(np.stack(engine(tmp_path / "out").logprobs(SEQUENCES)) - expected).max() <= 1e-5
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_weights_are_exported_in_bfloat16(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "of what training changed is left in bfloat16" in capsys.readouterr().err
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_training_that_rounding_erases_is_told(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    start, checkpoint = tmp_path / "start", tmp_path / "runs" / "r" / "checkpoints" / "step-000001"
    for folder, scale, tensors in ((start, 0.0, weights), (checkpoint / "model", 1e-4, weights)):
        shutil.copytree(base, folder)
        save_file(
            {name: tensor.float() * (1 + scale) for name, tensor in tensors.items()}, folder / "model.safetensors"
        )
    (checkpoint / "checkpoint.json").write_text("{}")
    command = ["export", str(checkpoint), "--dtype", "bfloat16"]
    assert main([*command, str(tmp_path / "one")]) == 0
    assert "unknown: name the base model with --base" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "two"), "--base", str(start)]) == 0
    said = capsys.readouterr().err
    assert "0% of what training changed is left in bfloat16: 100.0% of the changed weights" in said
    assert "--dtype float32" in said


def test_adapters_are_exported_alone_and_with_another_name_of_their_base(run: Path, base: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--adapter", "--base", "someone/model"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {CONFIG, WEIGHTS}
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["base_model_name_or_path"] == "someone/model"
    merged = tmp_path / "merged"
    assert main(["export", str(tmp_path / "out"), str(merged), "--base", str(base)]) == 0
    assert (merged / "model.safetensors").is_file()


def test_unexportable_models(run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main(["export", *words]) == 2
        return capsys.readouterr().err

    out = str(tmp_path / "out")
    assert "already exists" in said(str(run), str(tmp_path))
    assert "is neither a checkpoint nor a run that has one" in said(str(tmp_path), out)
    assert "contains no adapters" in said(str(run / "checkpoints" / "step-9"), out, "--adapter")
    other = tmp_path / "other"
    shutil.copytree(base, other)
    trained = engine(base)
    trained.train(SEQUENCES, SFTLoss())
    trained.model.save_hf(tmp_path / "trained")
    shutil.copy(tmp_path / "trained" / "model.safetensors", other)
    assert f"another base model than {other}" in said(str(run), out, "--base", str(other))
    assert not Path(out).exists()
