"""Finding and reading a recipe: those that come with the package, with their models, and one's own."""

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


def _in_apps() -> Iterator[tuple[str, Traversable]]:
    """What lies in the folders of `apps`, with the folder's name, in order."""
    try:
        folders = [entry for entry in files("apps").iterdir() if entry.is_dir() and entry.name[0] not in "_."]
    except ModuleNotFoundError:
        return
    for folder in sorted(folders, key=lambda entry: entry.name):
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            yield folder.name, entry


def bundled_recipes() -> dict[str, Traversable]:
    """Recipes that come with the package: `grpo/qwen3_8b`, or the folder alone for the one of its name."""
    recipes = [
        (app, entry.name.removesuffix(".yaml"), entry) for app, entry in _in_apps() if entry.name.endswith(".yaml")
    ]
    return {stem if stem == app else f"{app}/{stem}": entry for app, stem, entry in recipes}


def bundled_models() -> dict[str, Path]:
    """Checkpoint folders that come with the package, by name."""
    return {entry.name: Path(str(entry)) for _, entry in _in_apps() if (entry / "config.json").is_file()}


def checkpoint_folder(name: str) -> Path | None:
    """The folder that `model.path` names: a path, or a checkpoint that comes with the package; None: neither."""
    folder = user_path(name)
    return folder if folder.is_dir() else bundled_models().get(name)


def read_recipe(file: str) -> Source:
    """A recipe as written: a path, or the name of a bundled one, also `apps/grpo/qwen3_8b.yaml`, or without its folder.

    Raises:
        ConfigError: there is no such file, or it is not a YAML mapping.
    """
    bundled, name = bundled_recipes(), file.removesuffix(".yaml").removeprefix("apps/")
    alike = [known for known in bundled if name in (known, known.rpartition("/")[2])]
    if len(alike) == 1 and not user_path(file).is_file():
        file = alike[0]
    return read_file(file, bundled)


def read_run(
    file: str, overrides: Iterable[tuple[str, Any]] = (), environment: Mapping[str, str] | None = None
) -> Source:
    """A recipe with what the command line and the environment say, in its own keys (`forge_env.config.documents`).

    Args:
        file: as in `read_recipe`.
        overrides: dotted keys with values; they have the last word.
        environment: of the process, whose MODEL is a `model.path`; None: it says nothing.

    Raises:
        ConfigError: it can't be read, or some key can't be understood.
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
    """The validated recipe: `load_config("coding_rlvr", ["--grpo.steps", "20", "seed=1"])`.

    Raises:
        ConfigError: the recipe is wrong; every mistake is on a line of its own.
        UsageError: an override can't be parsed.
    """
    return build(RunConfig, read_run(file, parse_overrides(overrides, RunConfig)))
