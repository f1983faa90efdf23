"""Conversion of checkpoints with a vision part or in MXFP4 keeps log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from forge_env.cli.main import main
from forge_env.errors import UsageError
from tests.trainers.model.checkpoints import CHECKPOINTS, SHAPE, VOCABULARY, their_logprobs, write_checkpoint
from trainers.model.folder import read_hf_config
from trainers.model.text_part import fetched
from trainers.titan.model import check_weights

pytestmark = [pytest.mark.stack, pytest.mark.slow]
TOKENS = torch.randint(0, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(0))


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
SIGLIP = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


UNIFIED = {"patch_size": 4, "mm_embed_dim": 64, "mm_posemb_size": 8, "output_proj_dims": 64}
GEMMA4_12B = {name: value for name, value in CHECKPOINTS["Gemma 4"].items() if name != "hidden_size_per_layer_input"}
TEXTS = CHECKPOINTS | {"Gemma 4 12B": GEMMA4_12B | {"model_type": "gemma4_unified_text"}}
SEEING = ["Qwen 3.5", "Qwen 3.5 MoE", "Gemma 3, scaled", "Gemma 4", "Gemma 4 12B", "Gemma 4 E2B", "Gemma 4 MoE"]


@pytest.fixture(scope="module", params=SEEING)
def seeing(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder with a vision part, a draft head and, as on the hub, keys that no layer uses."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**SHAPE, **TEXTS[request.param]}
    text["rope_parameters"] = text.pop("rope_scaling", None)
    family, tied = text["model_type"].removesuffix("_text"), text.get("tie_word_embeddings", False)
    vision = {"gemma3": SIGLIP | {"image_size": 56}, "gemma4_unified": UNIFIED}.get(family, VISION)
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=tied)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hub") / "a1b2c3"
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    file = folder / "model.safetensors"
    more = {"mtp.fc.weight": torch.ones(2)}
    if request.param == "Gemma 4 E2B":
        more["model.language_model.layers.4.self_attn.k_proj.weight"] = torch.ones(128, 64)
    save_file(load_file(file) | more, file, {"format": "pt"})
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


def test_a_folder_without_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {**SHAPE, **CHECKPOINTS["Gemma 3"]}
    config = {"model_type": "gemma3", "text_config": text, "tie_word_embeddings": True}
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["model", "convert", str(folder), str(tmp_path / "out")]) == 2
    assert "no weights (*.safetensors)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture
def quantized(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with experts in MXFP4, with scales in a separate file, and one with the same weights in bfloat16."""
    from safetensors.torch import load_file, save_file

    plain, packed = write_checkpoint("gpt-oss", tmp_path / "plain"), tmp_path / "packed"
    packed.mkdir()
    generator = torch.Generator().manual_seed(0)
    whole = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    files: dict[str, dict[str, torch.Tensor]] = {"a": {}, "b": {}}
    for name, tensor in whole.items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            files["a"][name] = tensor
            continue
        experts, into, out = tensor.shape
        codes = torch.randint(0, 16, (experts, out, into // 32, 32), generator=generator)
        scales = torch.randint(120, 125, (experts, out, into // 32), generator=generator)
        files["a"][f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).byte()
        files["b"][f"{name}_scales"] = scales.byte()
        elements = torch.tensor([*FP4, *(-each for each in FP4)])[codes] * 2.0 ** (scales - 127)[..., None]
        whole[name] = elements.flatten(2).transpose(1, 2).bfloat16().contiguous()
    save_file(whole, plain / "model.safetensors", {"format": "pt"})
    for file, tensors in files.items():
        save_file(tensors, packed / f"{file}.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def test_weights_in_mxfp4_are_unpacked(quantized: tuple[Path, Path], tmp_path: Path) -> None:
    packed, plain = quantized
    with pytest.raises(UsageError, match="MXFP4") as refused:
        read_hf_config(packed)
    assert f"forge-env model convert {packed}" in str(refused.value.fix)
    out = tmp_path / "unpacked"
    assert main(["model", "convert", str(packed), str(out)]) == 0
    check_weights(out)
    assert torch.equal(their_logprobs(out, TOKENS), their_logprobs(plain, TOKENS))
