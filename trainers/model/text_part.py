"""Extraction of the text part of checkpoints with a vision part (Gemma 3, Qwen 3.5) to a folder that can be trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forge_env.errors import UsageError
from forge_env.files import written_whole
from forge_env.machine import cache_dir
from trainers.model.folder import (
    ARCHITECTURES,
    INDEX,
    check_hf_config,
    from_hub,
    has_vision,
    read_config,
    weight_files,
)

if TYPE_CHECKING:
    import torch

_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of the text part's tensor names, and their replacements; vision parts and draft heads have others."""
_HEAD = "lm_head.weight"


def text_part(folder: Path, out: Path) -> None:
    """Write the text part of a checkpoint folder as another folder, file by file."""
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from trainers.model.writer import read_companions

    config = read_config(folder)
    if not has_vision(config):
        raise UsageError(f"{folder} is not a checkpoint with a vision part", fix="use it as it is")
    names = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    text = {**{name: config[name] for name in names if name in config}, **config["text_config"]}
    text["model_type"] = family = f"{config['model_type']}_text"
    # config.json on the hub omits values that are defaults in transformers
    text = AutoConfig.for_model(**text).to_dict() | {"architectures": [ARCHITECTURES[family]]}
    check_hf_config(dict(text), str(folder))
    with written_whole(out) as staging:
        staging.mkdir(parents=True)
        weight_map: dict[str, str] = {}
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as opened:
                renamed = {name: _renamed(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
                kept = {new: opened.get_tensor(name) for name, new in renamed.items() if new is not None}
            tensors = {name: part for new, tensor in kept.items() for name, part in _parts(new, tensor)}
            if tensors:
                save_file(tensors, staging / file.name, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file.name)
        index = {"metadata": {}, "weight_map": weight_map}
        for name, content in read_companions(folder).items():
            (staging / name).write_bytes(content)
        for name, value in {"config.json": text, INDEX: index}.items():
            (staging / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def fetched(name: str) -> Path:
    """Download a model from the hub and return its folder.

    If the model has a vision part, its text part is written to the cache, and that folder is returned.
    """
    folder = from_hub(name)
    if not has_vision(read_config(folder)):
        return folder
    out = cache_dir() / "models" / f"{name.replace('/', '--')}-{folder.name[:12]}"
    if not out.is_dir():
        text_part(folder, out)
    return out


def _renamed(name: str) -> str | None:
    """Return a tensor's name in the text part; None if it belongs to another part."""
    for prefix, new in _PREFIXES.items():
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    return name if name == _HEAD else None


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Split a tensor of all experts of a layer by expert and projection; yield other tensors unchanged."""
    experts, _, projection = name.rpartition(".")
    if not experts.endswith(".experts"):
        yield name, tensor
        return
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[projection]
    for number, expert in enumerate(tensor):
        for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{experts}.{number}.{part}.weight", weight.clone()
