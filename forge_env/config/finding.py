"""Find and read recipes: bundled ones, with their models, and the user's own files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from forge_env.config.documents import translated
from forge_env.config.reader import Source, build, parse_overrides, read_file
from forge_env.config.recipe import GRPOSection, RunConfig, SFTSection
from forge_env.machine import user_path
from forge_env.models import MODELS, model_folder

DEPTH = 3
"""Levels below a folder that are searched for a model if the folder itself has none."""


def _in_apps() -> Iterator[tuple[str, Traversable]]:
    """Yield every entry of the folders in `apps`, with the folder's name, sorted by both names."""
    try:
        folders = [entry for entry in files("apps").iterdir() if entry.is_dir() and entry.name[0] not in "_."]
    except ModuleNotFoundError:
        return
    for folder in sorted(folders, key=lambda entry: entry.name):
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            yield folder.name, entry


def bundled_recipes() -> dict[str, Traversable]:
    """Recipes that come with the package, by `FOLDER/STEM`, or only the folder if the file has its name."""
    recipes = [
        (app, entry.name.removesuffix(".yaml"), entry) for app, entry in _in_apps() if entry.name.endswith(".yaml")
    ]
    return {stem if stem == app else f"{app}/{stem}": entry for app, stem, entry in recipes}


def bundled_models() -> dict[str, Path]:
    """Checkpoint folders that come with the package, by name."""
    return {entry.name: Path(str(entry)) for _, entry in _in_apps() if (entry / "config.json").is_file()}


def checkpoint_folder(name: str) -> Path | None:
    """The folder that `model.path` names: an existing path, a bundled checkpoint or a model fetched by
    `forge-env model get`; None if it is none of them."""
    folder = user_path(name)
    if folder.is_dir():
        return folder
    if name in MODELS and (fetched := model_folder(name)).is_dir():
        return fetched
    return bundled_models().get(name)


def fix_of_folder(folder: Path, scheme: str = "") -> str | None:
    """Fix for a path that is not a model folder, such as the newest model in it; None if there is no better path.

    Args:
        scheme: what the option writes before a path, such as `vllm:`.
    """
    if folder.suffix == ".gguf":
        return f"convert it first: forge-env model convert {folder} TO"
    if (folder / "adapter_config.json").is_file():
        return f"it has adapters; merge them into their base model: forge-env export {folder} TO"
    inside = newest_model(folder)
    return f"use {scheme}{inside}" if inside else None


def newest_model(folder: Path) -> Path | None:
    """The most recently written model in `folder`, such as a run's `checkpoints/step-000100/model`."""
    configs = [path for depth in range(1, DEPTH + 1) for path in folder.glob("*/" * depth + "config.json")]
    return max(configs, key=lambda path: (path.stat().st_mtime_ns, path)).parent if configs else None


def read_recipe(file: str) -> Source:
    """Read a recipe without validating it.

    Args:
        file: a path, or the name of a bundled recipe: `grpo/qwen3_8b`, `apps/grpo/qwen3_8b.yaml`, or the file's name
            alone if it is unique.
    """
    bundled, name = bundled_recipes(), file.removesuffix(".yaml").removeprefix("apps/")
    alike = [known for known in bundled if name in (known, known.rpartition("/")[2])]
    if len(alike) == 1 and not user_path(file).is_file():
        file = alike[0]
    return read_file(file, bundled)


def read_run(
    file: str, overrides: Iterable[tuple[str, Any]] = (), environment: Mapping[str, str] | None = None
) -> Source:
    """Read a recipe, apply overrides, and translate torchforge's keys (`forge_env.config.documents`).

    Args:
        environment: environment variables; MODEL sets `model.path`. None: no variable is read.
    """
    source, model = read_recipe(file), ("model",)
    if isinstance(path := source.data.get("model"), str):
        lines = {**source.lines, ("model", "path"): source.line(model)}
        source = replace(source, data={**source.data, "model": {"path": path}}, lines=lines)
    given = [("model.path", name)] if (name := (environment or {}).get("MODEL")) else []
    given += [("model.path" if key == "model" and isinstance(value, str) else key, value) for key, value in overrides]
    grpo, sft = GRPOSection(), SFTSection()
    defaults = {
        "grpo.groups_per_step": grpo.groups_per_step,
        "grpo.max_off_policy_steps": grpo.max_off_policy_steps,
        "sft.batch_size": sft.batch_size,
    }
    return translated(source.with_overrides(given), defaults)


def load_config(file: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate a recipe: `load_config("coding_rlvr", ["--grpo.steps", "20", "seed=1"])`.

    Raises:
        ConfigError: the recipe is invalid; each mistake is on its own line.
        UsageError: an override can't be parsed.
    """
    return build(RunConfig, read_run(file, parse_overrides(overrides, RunConfig)))
