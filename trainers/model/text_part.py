"""Conversion of checkpoints to folders that can be trained: the text part of vision models, MXFP4 to bfloat16."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.errors import UsageError
from forge_env.files import written_whole
from forge_env.machine import cache_dir
from trainers.model.folder import (
    ARCHITECTURES,
    GEMMA4,
    INDEX,
    check_hf_config,
    from_hub,
    is_packed,
    read_config,
    tensors_in,
    text_family,
    unused_tensors,
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
    """Write the text part of a checkpoint folder to a new folder, file by file, with MXFP4 unpacked to bfloat16."""
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from trainers.model.writer import read_companions, write_companions

    config = read_config(folder)
    packed, family = is_packed(config), text_family(config)
    if not packed and family is None:
        raise UsageError(f"{folder} has neither a vision part nor weights in MXFP4", fix="use it without conversion")
    if family is None:
        text = {name: value for name, value in config.items() if name != "quantization_config"} | {"dtype": "bfloat16"}
    else:
        names = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
        text = {**{name: config[name] for name in names if name in config}, **config["text_config"]}
        text["model_type"] = f"{config['model_type']}_text"
        # config.json on the hub omits values that are defaults in transformers
        text = AutoConfig.for_model(**text).to_dict() | {"model_type": family, "architectures": [ARCHITECTURES[family]]}
        if family == GEMMA4:
            text.setdefault("hidden_size_per_layer_input", 0)  # absent from 12B's config.json
    unused = unused_tensors(check_hf_config(dict(text), str(folder)))
    with written_whole(out) as staging, ExitStack() as stack:
        staging.mkdir(parents=True)
        weight_map: dict[str, str] = {}
        tensors_in(folder)  # refuses missing and damaged files
        files = weight_files(folder)
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        for file, source in zip(files, opened, strict=True):
            tensors = dict(_unpacked(source, opened) if packed else _text(source, unused))
            if tensors:
                save_file(tensors, staging / file.name, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file.name)
        index = {"metadata": {}, "weight_map": weight_map}
        write_companions(read_companions(folder), staging)
        for name, value in {"config.json": text, INDEX: index}.items():
            (staging / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def fetched(name: str) -> Path:
    """Download a model from the hub and return its folder.

    A model with a vision part or with weights in MXFP4 is converted once; the folder of the result is in the cache.
    """
    folder = from_hub(name)
    if text_family(config := read_config(folder)) is None and not is_packed(config):
        return folder
    out = cache_dir() / "models" / f"{name.replace('/', '--')}-{folder.name[:12]}"
    if not out.is_dir():
        text_part(folder, out)
    return out


def _unpacked(source: Any, files: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a file's tensors with MXFP4 unpacked to bfloat16; scales may be in another file of the checkpoint."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name in source.keys():  # noqa: SIM118 - not a mapping
        tensor, base = source.get_tensor(name), name.removesuffix("_blocks")
        if base != name:
            scales = next(file for file in files if f"{base}_scales" in file.keys())  # noqa: SIM118
            yield base, convert_moe_packed_tensors(tensor, scales.get_tensor(f"{base}_scales"))
        elif not name.endswith("_scales"):
            yield name, tensor


def _text(source: Any, unused: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the text part in a file, without unused ones."""
    for name in source.keys():  # noqa: SIM118 - not a mapping
        if (new := _renamed(name)) is not None and new not in unused:
            yield from _parts(new, source.get_tensor(name))


def _renamed(name: str) -> str | None:
    """Return a tensor's name in the text part; None if it belongs to another part."""
    for prefix, new in _PREFIXES.items():
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    return name if name == _HEAD else None


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Split Qwen 3.5's joint tensors of experts by expert and projection; yield other tensors unchanged."""
    experts, _, projection = name.rpartition(".")
    if not experts.endswith(".mlp.experts"):
        yield name, tensor
        return
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[projection]
    for number, expert in enumerate(tensor):
        for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{experts}.{number}.{part}.weight", weight.clone()
