"""Export of models from checkpoints, for use outside forge-env (`forge-env export`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from forge_env.config.reader import read_as
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.files import written_whole
from forge_env.reading import ANYWHERE, check_files
from forge_env.run.folder import RunFolder
from trainers.model import adapter
from trainers.model.folder import check_folder, local_folder, weight_files
from trainers.model.merging import merged, scaled
from trainers.model.parts import Part
from trainers.model.rounding import Change
from trainers.model.text_part import fetched
from trainers.model.writer import read_companions, write_model

MOSTLY = 0.9
"""Share of the change below which rounding is advised against."""


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder, by their Hugging Face names."""
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def export(
    source: Path, out: Path, *, adapter_only: bool, dtype: str, base: str | None, tell: Callable[[str], object]
) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder, or its adapters in PEFT's format.

    Args:
        source: a checkpoint, a folder of adapters, or a run's folder, of which the newest checkpoint is used.
        out: folder to write, which must not exist.
        adapter_only: write only the adapters.
        dtype: data type of the weights.
        base: checkpoint folder or hub name of the base model; by default the one that the checkpoint was trained from.
        tell: called with a line on what rounding leaves of the training, if `dtype` is not float32.

    Returns:
        The checkpoint that was exported.
    """
    if out.exists():
        raise UsageError(f"{out} already exists", fix="name a new folder")
    checkpoint = _find(source)
    adapters = checkpoint if (checkpoint / adapter.CONFIG).is_file() else checkpoint / adapter.FOLDER
    if not adapters.is_dir():
        if adapter_only:
            raise UsageError(f"{checkpoint} contains no adapters: all weights were trained", fix="leave --adapter out")
        model = checkpoint / "model"
        weights = read_weights(model)
        _write(weights, model, out, dtype)
        if dtype != "float32":
            tell(_what_is_left(weights, _trained_from(checkpoint, base), dtype))
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
    weights = dict(merged(factors, folder, everything=True))
    _write(weights, folder, out, dtype)
    if dtype != "float32":
        tell(_what_is_left(weights, folder, dtype))
    return checkpoint


def _trained_from(checkpoint: Path, base: str | None) -> Path | None:
    """The folder of the model that a checkpoint's run trained; None if it is not on this machine."""
    if base is not None:
        return _base(base)
    try:
        return local_folder(read_as(RunConfig, RunFolder(checkpoint.parent.parent).config).model.path)
    except (OSError, UsageError):  # not in its run's folder any more, or a recipe of another version
        return None


def _what_is_left(weights: Mapping[str, torch.Tensor], base: Path | None, dtype: str) -> str:
    """Say how much of what training changed in a base model's weights is left after rounding to `dtype`."""
    if base is None:
        return f"how much of the training is left in {dtype} is unknown: name the base model with --base"
    change = Change()
    for file in weight_files(base):
        with safe_open(file, framework="pt") as opened:
            for name in weights.keys() & opened.keys():
                before = opened.get_tensor(name)
                if before.shape != weights[name].shape:
                    raise UsageError(f"{name} has another shape in {base}", fix="name the base model with --base")
                change.add(before, weights[name], getattr(torch, dtype))
    if not change.changed:
        return f"the weights are those of {base}"
    reverted = change.reverted / change.changed
    text = (
        f"{change.share:.0%} of what training changed is left in {dtype}: {reverted:.1%} of the changed weights have "
        "their old value again"
    )
    return text if change.share >= MOSTLY else f"{text}. Export with --dtype float32 to keep what was trained"


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
        return fetched(name)
    check_folder(folder, 1)
    return folder


def _write(weights: Mapping[str, torch.Tensor], like: Path, out: Path, dtype: str) -> None:
    """Write whole weights as a folder that appears complete or not at all."""
    with written_whole(out) as staging:
        write_model(Part.all_of(weights), read_companions(like), staging, dtype=getattr(torch, dtype))
