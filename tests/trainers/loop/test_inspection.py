"""`forge-env model inspect` describes a model before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from forge_env.cli.main import main
from tests.trainers.model.checkpoints import write_checkpoint
from tests.trainers.model.families import family_folder

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def described(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = (line.partition("  ") for line in capsys.readouterr().out.splitlines())
    return {subject: text.strip() for subject, _, text in lines}


def test_a_folder_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = family_folder(write_checkpoint("Llama 3.2", tmp_path / "model"), "smollm2")
    assert main(["model", "inspect", str(folder)]) == 0
    found = described(capsys)
    assert found["family"].startswith("llama: ")
    assert "tied to the head" in found["parameters"]
    assert "GiB in F32" in found["files"]
    assert found["tools"].startswith("as text")
    assert found["trains"] == "yes: all weights or LoRA"
    (folder / "chat_template.jinja").unlink()
    assert main(["model", "inspect", str(folder)]) == 0
    found = described(capsys)
    assert found["chat format"].startswith("none in the folder")
    assert found["trains"].startswith(f"no: {folder} has no chat template")
    (folder / "tokenizer.json").write_text("{}")
    assert main(["model", "inspect", str(folder)]) == 0
    assert "tokenizer.json can't be read" in described(capsys)["trains"]
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert main(["model", "inspect", str(folder)]) == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "family", "head"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2", "apart from the head"),
        ("HuggingFaceTB/SmolLM3-3B", "smollm3", "tied to the head"),
        ("microsoft/phi-4", "phi3", "apart from the head"),
        ("microsoft/Phi-4-mini-instruct", "phi3", "tied to the head"),
        ("google/gemma-3-270m-it", "gemma3_text", "tied to the head"),
        ("google/gemma-3-27b-it", "gemma3_text", "tied to the head"),
        ("google/gemma-4-12B-it", "gemma4_text", "tied to the head"),
        ("google/gemma-4-E2B-it", "gemma4_text", "tied to the head"),
        ("google/gemma-4-26B-A4B-it", "gemma4_text", "tied to the head"),
        ("Qwen/Qwen3.5-0.8B", "qwen3_5_text", "tied to the head"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text", "apart from the head"),
        ("openai/gpt-oss-20b", "gpt_oss", "apart from the head"),
    ],
)
def test_hub_name_without_a_network(name: str, family: str, head: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", name]) == 0
    found = described(capsys)
    assert found["family"].startswith(f"{family}: ")
    assert head in found["parameters"]


def test_tiny_is_built_by_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", "tiny"]) == 2
    assert "is built when a run starts" in capsys.readouterr().err


def test_a_gguf_file_is_converted_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", str(tmp_path / "model.gguf")]) == 2
    assert "forge-env model convert" in capsys.readouterr().err
