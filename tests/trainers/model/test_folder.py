"""Checkpoint folders of strangers: only files of the folder are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forge_env.errors import UsageError
from trainers.model.folder import (
    FAMILIES,
    INDEX,
    check_folder,
    check_hf_config,
    heads,
    kv_source,
    read_hf_config,
    tensors_in,
    weight_files,
)
from trainers.plan.shape import hub_config, published


@pytest.mark.parametrize("name", ["/etc/hostname", "../secret.safetensors", "a/../../secret.safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UsageError, match="outside of its folder") as raised:
        weight_files(folder)
    assert name in raised.value.message


def test_weights_are_regular_files_and_may_be_links(tmp_path: Path) -> None:
    """The hub's cache is a folder of links; a named pipe would block whoever reads it."""
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "model.safetensors").symlink_to("blob")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "pipe.safetensors"}}))
    with pytest.raises(UsageError, match=r"lacks pipe\.safetensors"):
        weight_files(tmp_path)


def test_a_pipe_or_zeros_in_place_of_a_document_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UsageError, match="is a named pipe"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="is a device"):
        read_hf_config(tmp_path)


@pytest.mark.stack
@pytest.mark.parametrize("layers", [6, 12, 60])
def test_gemma_4_is_read_as_transformers_saves_it(layers: int) -> None:
    from transformers import AutoConfig

    name = "google/gemma-4-31B"
    saved = AutoConfig.for_model(**published()[name] | {"num_hidden_layers": layers}).to_dict()
    assert len(saved["per_layer_config"]) == layers // 6
    config = check_hf_config(saved, name)
    assert [heads(config, layer) for layer in range(layers)] == [
        heads(hub_config(name), layer) for layer in range(layers)
    ]


def test_layers_use_the_keys_of_the_last_layer_of_their_kind() -> None:
    config = hub_config("google/gemma-4-E2B")
    assert [kv_source(config, layer) for layer in (0, 14, 15, 18, 19, 34)] == [None, None, 13, 13, 14, 14]
    del config["num_kv_shared_layers"]
    assert kv_source(config, 34) is None


def test_experts_of_gemma_4_need_their_sizes() -> None:
    config = {**published()["google/gemma-4-26B-A4B"]}
    del config["top_k_experts"]
    with pytest.raises(UsageError, match=r"config\.json of a model lacks top_k_experts"):
        check_hf_config(config, "a model")


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "gpt_oss"])
def test_a_key_without_a_value_is_missing(family: str) -> None:
    config = dict.fromkeys(FAMILIES[family], 2) | {"model_type": family, "sliding_window": None}
    with pytest.raises(UsageError, match=r"config\.json of a model lacks sliding_window"):
        check_hf_config(config, "a model")


def test_weights_in_mxfp4_of_an_unknown_family_are_refused() -> None:
    with pytest.raises(UsageError, match="is a None model"):
        check_hf_config({"quantization_config": {"quant_method": "mxfp4"}}, "a model")


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64', not a positive number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a positive number"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0, not a positive number"),
        ({"max_position_embeddings": "8k"}, "max_position_embeddings is '8k', not a positive number"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3', not an object"),
        ({"layer_types": ["full_attention"]}, "layer_types doesn't list the kinds of 18 layers"),
    ],
)
def test_a_value_that_no_model_can_have_is_named(change: dict[str, Any], mistake: str) -> None:
    with pytest.raises(UsageError, match=r"config\.json of a model: ") as refused:
        check_hf_config({**published()["google/gemma-3-270m"], **change}, "a model")
    assert mistake in refused.value.message


@pytest.mark.parametrize(
    ("file", "fix"),
    [
        ("adapter_config.json", "forge-env export FOLDER TO"),
        ("snapshots/abc/config.json", "use FOLDER/snapshots/abc"),
        ("README.md", "model.path is 'tiny'"),
    ],
)
def test_a_folder_without_a_model_suggests_what_to_do(file: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(UsageError, match=r"no config\.json") as refused:
        read_hf_config(tmp_path)
    assert fix.replace("FOLDER", str(tmp_path)) in (refused.value.fix or "")


@pytest.mark.stack
def test_fixes_of_files_that_transformers_can_convert(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published()["Qwen/Qwen3-0.6B"]))
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UsageError, match=r"no tokenizer\.json") as refused:
        check_folder(tmp_path, 1)
    assert "AutoTokenizer.from_pretrained" in (refused.value.fix or "")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="no weights") as refused:
        tensors_in(tmp_path)
    assert "AutoModelForCausalLM.from_pretrained" in (refused.value.fix or "")


@pytest.mark.stack
@pytest.mark.parametrize(("content", "fix"), [("version https://git-lfs.github.com", "git lfs pull"), ("", "again")])
def test_damaged_weights_are_named(content: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text(content)
    with pytest.raises(UsageError, match=r"model\.safetensors is damaged") as refused:
        tensors_in(tmp_path)
    assert fix in (refused.value.fix or "")


@pytest.mark.stack
def test_adapters_of_another_program_are_refused(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from trainers.model.adapter import CONFIG, WEIGHTS, check_base

    config = {"peft_type": "LORA", "base_model_name_or_path": "org/model", "r": 8, "lora_alpha": 16}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / WEIGHTS)
    with pytest.raises(UsageError, match="that forge-env didn't write"):
        check_base(tmp_path, tmp_path)
