"""The text part of checkpoints that also read images, as Qwen 3.5's do: a folder of its own, which can be trained."""

from __future__ import annotations

import json
from pathlib import Path

from forge_env.errors import UsageError
from forge_env.files import written_whole
from forge_env.machine import cache_dir
from trainers.model.folder import INDEX, check_hf_config, from_hub, has_vision, read_config, weight_files

_PREFIX = "model.language_model."
"""Of the names of the text part's tensors, besides the head; those of the vision part and of draft heads differ."""
_HEAD = "lm_head.weight"


def text_part(folder: Path, out: Path) -> None:
    """Write the text part of a checkpoint folder as another folder, file by file."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from trainers.model.writer import read_companions

    config = read_config(folder)
    if not has_vision(config):
        raise UsageError(f"{folder} is not a checkpoint with a vision part", fix="use it as it is")
    shared = {name: config[name] for name in ("dtype", "torch_dtype", "quantization_config") if name in config}
    text = {**shared, "tie_word_embeddings": config.get("tie_word_embeddings", False), **config["text_config"]}
    text |= {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    check_hf_config(dict(text), str(folder))
    with written_whole(out) as staging:
        staging.mkdir(parents=True)
        weight_map: dict[str, str] = {}
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as opened:
                names = {name: _renamed(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
                tensors = {new: opened.get_tensor(name) for name, new in names.items() if new is not None}
            if tensors:
                save_file(tensors, staging / file.name, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file.name)
        index = {"metadata": {}, "weight_map": weight_map}
        for name, content in read_companions(folder).items():
            (staging / name).write_bytes(content)
        for name, value in {"config.json": text, INDEX: index}.items():
            (staging / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def fetched(name: str) -> Path:
    """Download a model from the hub, and return its folder; of one with a vision part, that of its text part in the
    cache.
    """
    folder = from_hub(name)
    if not has_vision(read_config(folder)):
        return folder
    out = cache_dir() / "models" / f"{name.replace('/', '--')}-{folder.name[:12]}"
    if not out.is_dir():
        text_part(folder, out)
    return out


def _renamed(name: str) -> str | None:
    """Name of a tensor in the text part; None: it isn't in there."""
    if name.startswith(_PREFIX):
        return "model." + name.removeprefix(_PREFIX)
    return name if name == _HEAD else None
