"""Export of models from checkpoints, for use outside forge-env (`forge-env export`)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from forge_env.errors import UsageError
from forge_env.files import written_whole
from forge_env.reading import ANYWHERE, check_files
from forge_env.run.folder import RunFolder
from trainers.model import adapter
from trainers.model.folder import check_folder, from_hub, local_folder, weight_files
from trainers.model.merging import merged, scaled
from trainers.model.parts import Part
from trainers.model.writer import read_companions, write_model


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder, by their Hugging Face names."""
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def export(source: Path, out: Path, *, adapter_only: bool, dtype: str, base: str | None) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder, or its adapters in PEFT's format.

    Args:
        source: a checkpoint, a folder of adapters, or a run's folder, of which the newest checkpoint is used.
        out: folder to write, which must not exist.
        adapter_only: write only the adapters.
        dtype: data type of the weights.
        base: checkpoint folder or hub name of the adapters' base model; by default the one they were trained on.

    Returns:
        The checkpoint that was exported.

    Raises:
        UsageError: there is nothing to export, or the adapters belong to another base model.
    """
    if out.exists():
        raise UsageError(f"{out} already exists", fix="name a new folder")
    checkpoint = _find(source)
    adapters = checkpoint if (checkpoint / adapter.CONFIG).is_file() else checkpoint / adapter.FOLDER
    if not adapters.is_dir():
        if adapter_only:
            raise UsageError(f"{checkpoint} contains no adapters: all weights were trained", fix="leave --adapter out")
        model = checkpoint / "model"
        _write(read_weights(model), model, out, dtype)
        return checkpoint
    name = base or adapter.read_config(adapters)["base_model_name_or_path"]
    if adapter_only:
        with written_whole(out) as staging:
            shutil.copytree(adapters, staging)
            if base is not None:
                adapter.write_config({**adapter.read_config(adapters), "base_model_name_or_path": base}, staging)
        return checkpoint
    folder = _base(name)
    adapter.check_base(adapters, folder)
    factors = scaled(load_file(adapters / adapter.WEIGHTS), adapter.scaling(adapter.read_config(adapters)))
    _write(dict(merged(factors, folder, everything=True)), folder, out, dtype)
    return checkpoint


def _find(source: Path) -> Path:
    """Resolve a path to a checkpoint or a folder of adapters."""
    inside = [file.parent for file in RunFolder(source).checkpoints.glob("step-*/checkpoint.json")]
    newest_first = sorted(inside, key=lambda folder: int(folder.name.removeprefix("step-")), reverse=True)
    for folder in (source, *newest_first):
        if any((folder / name).exists() for name in ("checkpoint.json", adapter.FOLDER, adapter.CONFIG)):
            check_files(folder, ANYWHERE if folder == source else source)  # adapters in the hub's cache are links
            return folder
    raise UsageError(
        f"{source} is neither a checkpoint nor a run that has one", fix="for example runs/NAME, or .../step-000020"
    )


def _base(name: str) -> Path:
    if (folder := local_folder(name)) is None:
        return from_hub(name)
    check_folder(folder, 1)
    return folder


def _write(weights: Mapping[str, torch.Tensor], like: Path, out: Path, dtype: str) -> None:
    """Write whole weights as a folder that appears complete or not at all."""
    with written_whole(out) as staging:
        write_model(Part.all_of(weights), read_companions(like), staging, dtype=getattr(torch, dtype))
