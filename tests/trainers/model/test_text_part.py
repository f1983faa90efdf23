"""The text part of a checkpoint with a vision part, in the hub's format, computes the same as before."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from forge_env.cli.main import main
from forge_env.errors import UsageError
from tests.trainers.model.checkpoints import CHECKPOINTS, SHAPE, VOCABULARY, their_logprobs
from trainers.model.folder import read_hf_config
from trainers.model.text_part import fetched
from trainers.titan.model import check_weights

pytestmark = [pytest.mark.stack, pytest.mark.slow]
TOKENS = torch.randint(0, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(0))


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
SIGLIP = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.fixture(scope="module", params=["Qwen 3.5", "Qwen 3.5 MoE", "Gemma 3, scaled"])
def seeing(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder with a vision part and a draft head."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**SHAPE, **CHECKPOINTS[request.param]}
    text["rope_parameters"] = text.pop("rope_scaling", None)
    family, tied = text["model_type"].removesuffix("_text"), text.get("tie_word_embeddings", False)
    vision = SIGLIP | {"image_size": 56} if family == "gemma3" else VISION
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=tied)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hub") / "a1b2c3"
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.ones(2)}, file, {"format": "pt"})
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_refusal_names_the_command(seeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="vision part") as refused:
        read_hf_config(seeing)
    assert f"forge-env model convert {seeing}" in str(refused.value.fix)
    out = tmp_path / "text"
    assert main(["model", "convert", str(seeing), str(out)]) == 0
    check_weights(out)
    assert (out / "tokenizer.json").is_file()
    assert torch.equal(their_logprobs(out, TOKENS), their_logprobs(seeing, TOKENS))
    capsys.readouterr()
    assert main(["model", "convert", str(out), str(tmp_path / "again")]) == 2
    assert "vision part" in capsys.readouterr().err


def test_hub_models_use_their_text_part(seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_ENV_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(seeing))
    folder = fetched("Qwen/Qwen3.5-0.8B")
    assert folder.is_relative_to(tmp_path)
    check_weights(folder)
    written = folder.stat().st_mtime_ns
    assert fetched("Qwen/Qwen3.5-0.8B") == folder
    assert folder.stat().st_mtime_ns == written, "it is written once"
