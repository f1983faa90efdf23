"""Checkpoint folders: what `model.path` names, looked at before anything is started. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_env.config.recipe import checkpoint_folder
from forge_env.errors import UsageError
from forge_env.machine import user_path

FIX = (
    "model.path is 'tiny', a Hugging Face checkpoint folder, a checkpoint that comes with forge-env "
    "(coding_rlvr_base), or a hub name such as Qwen/Qwen3-0.6B"
)
NEEDED = (
    *("hidden_size", "head_dim", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "rms_norm_eps", "vocab_size"),
)


def local_folder(path: str) -> Path | None:
    """The folder that `model.path` names; None for a hub name.

    Raises:
        UsageError: it can only be a path, and there is no folder.
    """
    if (folder := checkpoint_folder(path)) is not None:
        return folder
    if user_path(path).exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1 or not path.strip():
        raise UsageError(f"model.path: there is no folder {path!r}", fix=FIX)
    return None


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a Qwen3 checkpoint folder."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no config.json in {folder}", fix=FIX) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}", fix="fetch the checkpoint again") from error
    family = config.get("model_type") if isinstance(config, dict) else None
    if family != "qwen3":
        raise UsageError(f"{folder} is a {family!r} model", fix="use a dense Qwen3 checkpoint")
    if absent := [key for key in NEEDED if key not in config]:
        raise UsageError(f"{path} lacks {', '.join(absent)}", fix="fetch the checkpoint again")
    if feature := _unsupported(config):
        raise UsageError(f"{path} has {feature}, which the trainer lacks", fix="use a Qwen3 checkpoint without it")
    found: dict[str, Any] = config
    return found


def _unsupported(config: Mapping[str, Any]) -> str | None:
    """What the generator would compute and the trainer not: their log-probabilities would differ without a word."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        return f"rotary positions scaled by {kind!r}"
    if config.get("attention_bias"):
        return "biases in its attention"
    return "sliding-window attention" if config.get("use_sliding_window") else None


def check_folder(folder: Path, max_length: int) -> None:
    """Refuse a checkpoint folder that trainer or generator could not load.

    Raises:
        UsageError: with what is wrong with it.
    """
    from safetensors import SafetensorError, safe_open

    config = read_hf_config(folder)
    longest = config.get("max_position_embeddings")
    if longest is not None and max_length > longest:
        raise UsageError(
            f"model.max_length={max_length} is more than the model was made for ({longest})",
            fix=f"use model.max_length={longest} or less",
        )
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"no tokenizer.json in {folder}", fix=FIX)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UsageError(f"no weights (*.safetensors) in {folder}", fix=FIX)
    for file in weights:
        try:
            with safe_open(file, framework="np"):  # reads the header, and compares it with the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} is damaged: {error}", fix="fetch the checkpoint again") from error


def check_heads(hf: Mapping[str, Any], degree: int) -> None:
    """Every tensor-parallel process of the trainer has the same number of heads.

    Raises:
        UsageError: it can't be.
    """
    for key in ("num_attention_heads", "num_key_value_heads"):
        fix = "use a divisor, and data_parallel_shard_degree for the other processes"
        _check_divides("trainer.parallelism.tensor_parallel_degree", degree, hf, key, fix)


def check_generator_heads(hf: Mapping[str, Any], procs: int) -> None:
    """Every process of a generator has the same number of attention heads; vLLM copies key-value heads.

    Raises:
        UsageError: it can't be.
    """
    _check_divides("generator.procs", procs, hf, "num_attention_heads", "use a divisor, and generator.num_replicas")


def _check_divides(name: str, degree: int, hf: Mapping[str, Any], key: str, fix: str) -> None:
    if hf[key] % degree:
        raise UsageError(f"{name}={degree} does not divide the model's {key} ({hf[key]})", fix=fix)
