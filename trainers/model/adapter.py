"""LoRA adapters (Hu et al. 2021) in files: PEFT's format, and the base model they belong to. Doesn't import torch.

    adapter/
        adapter_config.json          read by PEFT, vLLM and transformers: base model, rank, alpha, layers
        adapter_model.safetensors    base_model.model.LAYER.lora_A.weight [rank, in], .lora_B.weight [out, rank]

A layer's weight with its adapter is W + alpha / rank * B A. The header of the weights file holds the checksums of the
base model's files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from forge_env.config.recipe import LoRASection
from forge_env.errors import UsageError
from forge_env.reading import ANYWHERE, read_json
from trainers.model.folder import (
    GEMMA4,
    QWEN3_5,
    feed_forward_width,
    file_digests,
    heads,
    is_linear,
    keys_are_values,
    kv_source,
)

FOLDER = "adapter"
"""Folder of a checkpoint that holds its adapters."""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's prefix of layer names."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
_BASE = "base"


def layer_shapes(hf: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of the layers that can have an adapter, by the last part of their names.

    If the shapes of a name differ between blocks, the smallest counts.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for block in range(hf["num_hidden_layers"]):
        for name, shape in block_shapes(hf, block).items():
            shapes[name] = min(shapes.get(name, shape), shape)
    return shapes


def block_shapes(hf: Mapping[str, Any], block: int) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of a block's layers that can have an adapter, by the last part of their names."""
    dim, (head, kv_heads) = hf["hidden_size"], heads(hf, block)
    queries, keys = hf["num_attention_heads"] * head, kv_heads * head
    if hf["model_type"] == "phi3":
        inner = hf["intermediate_size"]
        attention = {"qkv_proj": (queries + 2 * keys, dim), "o_proj": (dim, queries)}
        return attention | {"gate_up_proj": (2 * inner, dim), "down_proj": (dim, inner)}
    if is_linear(hf, block):
        values = hf["linear_num_value_heads"] * hf["linear_value_head_dim"]
        mixed = 2 * hf["linear_num_key_heads"] * hf["linear_key_head_dim"] + values
        shapes = {"in_proj_qkv": (mixed, dim), "in_proj_z": (values, dim), "out_proj": (dim, values)}
    else:
        gates = queries if hf["model_type"] in QWEN3_5 else 0  # the output's gate is in the same matrix
        shapes = {"q_proj": (queries + gates, dim)}
        if kv_source(hf, block) is None:
            shapes["k_proj"] = keys, dim
            if not keys_are_values(hf, block):
                shapes["v_proj"] = keys, dim
        shapes["o_proj"] = (dim, queries)
    if not hf.get("num_experts") or hf["model_type"] == GEMMA4:  # in others, PEFT applies these names to experts
        inner = feed_forward_width(hf, block)
        shapes |= {"gate_proj": (inner, dim), "up_proj": (inner, dim), "down_proj": (dim, inner)}
    return shapes


def adapter_parameters(section: LoRASection, hf: Mapping[str, Any]) -> int:
    """Number of parameters of all adapters; see `targets`."""
    chosen, blocks = targets(section, hf), range(hf["num_hidden_layers"])
    shapes = [shape for block in blocks for name, shape in block_shapes(hf, block).items() if name in chosen]
    return section.rank * sum(map(sum, shapes))


def targets(section: LoRASection, hf: Mapping[str, Any]) -> list[str]:
    """Layers that get an adapter, by the last part of their names.

    Raises:
        UsageError: the model has no such layer, or the rank exceeds a dimension of one.
    """
    shapes = layer_shapes(hf)
    chosen = list(dict.fromkeys(section.targets)) or list(shapes)
    if unknown := [name for name in chosen if name not in shapes]:
        raise UsageError(
            f"lora.targets: this {hf['model_type']} model has no layer {unknown[0]!r} that can have an adapter",
            fix=f"choose from {', '.join(shapes)}",
        )
    name = min(chosen, key=lambda name: min(shapes[name]))
    if section.rank > (most := min(shapes[name])):
        out, into = shapes[name]
        raise UsageError(
            f"lora.rank={section.rank} is more than {name} has ({out} x {into}): it would have more parameters than "
            "the layer itself",
            fix=f"use at most {most}, or leave {name} out of lora.targets",
        )
    return chosen


def peft_config(section: LoRASection, hf: Mapping[str, Any], base: str) -> dict[str, Any]:
    """Content of `adapter_config.json`; `base` is the name or folder of the base model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets(section, hf),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def weights_header(base: Path) -> dict[str, str]:
    """Header of the adapters' weights file, which identifies their base model."""
    return {"format": "pt", _BASE: " ".join(file_digests(base))}


def check_base(folder: Path, base: Path, header: Mapping[str, str] | None = None) -> None:
    """Check that adapters belong to a base model; if its `weights_header` isn't given, this reads all of its files.

    Raises:
        UsageError: they belong to another base model, or can't be read.
    """
    config = read_config(folder)
    try:
        with safe_open(folder / WEIGHTS, framework="np") as opened:
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{folder / WEIGHTS} can't be read: {error}", fix="fetch the adapters again") from error
    if _BASE not in metadata:
        raise UsageError(
            f"{folder} has adapters that forge-env didn't write, so their base model can't be verified",
            fix="merge them with PEFT (merge_and_unload), and use the folder of the merged model",
        )
    if metadata[_BASE] != (header or weights_header(base))[_BASE]:
        name = config["base_model_name_or_path"]
        raise UsageError(
            f"{folder} has adapters of another base model than {base}: they were trained on {name}, whose weights are "
            "not the same",
            fix=f"use that one: model.path={name}",
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `adapter_config.json` of a folder."""
    try:
        config: dict[str, Any] = read_json(folder / CONFIG, root=ANYWHERE)
        if config["peft_type"] != "LORA" or not isinstance(config["base_model_name_or_path"], str):
            raise KeyError("peft_type")
        float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(
            f"{folder} contains no LoRA adapters: {error!r}", fix=f"name a folder with {CONFIG}"
        ) from error
    return config


def write_config(config: Mapping[str, Any], folder: Path) -> None:
    """Write `adapter_config.json`."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def scaling(config: Mapping[str, Any]) -> float:
    """Factor of B A, from `adapter_config.json`."""
    return float(config["lora_alpha"]) / int(config["r"])
