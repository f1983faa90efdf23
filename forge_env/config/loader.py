"""From a YAML file and overrides to a validated `RunConfig`; errors name the file, the line, the key and the fix.

config = load_config("coding_rlvr", ["--grpo.steps", "20", "seed=1"])
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from forge_env.config.problems import KeyPath, Source, problems, section_of
from forge_env.config.recipe import RunConfig, Section
from forge_env.config.yaml_format import read
from forge_env.errors import ConfigError, UsageError, did_you_mean
from forge_env.machine import user_path

OVERRIDE = re.compile(r"^(?P<key>[A-Za-z_][\w-]*(\.[\w-]+)*)=(?P<value>.*)$", re.DOTALL)


def bundled_recipes() -> dict[str, Traversable]:
    """Recipes that come with the package, by file name without `.yaml`."""
    try:
        root = files("apps")
    except ModuleNotFoundError:
        return {}
    return {entry.name.removesuffix(".yaml"): entry for entry in _walk(root)}


def _walk(folder: Traversable) -> Iterator[Traversable]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and not entry.name.startswith(("_", ".")):
            yield from _walk(entry)
        elif entry.name.endswith((".yaml", ".yml")):
            yield entry


def read_source(file: str) -> Source:
    """Read a recipe: a path, or the name of a bundled one with or without `.yaml`.

    Raises:
        ConfigError: there is no such file, or it is no YAML mapping.
    """
    path = user_path(file)
    if path.is_file():
        return parse(_read(path), file)
    recipes = bundled_recipes()
    if (name := file.removesuffix(".yaml")) in recipes and (not path.parent.name or str(path) == file):
        return parse(recipes[name].read_text(encoding="utf-8"), f"{name}.yaml")
    if path.is_dir():
        raise ConfigError(f"{file} is a folder", fix="name a YAML file in it")
    beside = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    guess = did_you_mean(name, recipes) or did_you_mean(path.name, beside)
    known = ", ".join(recipes) or "none"
    raise ConfigError(
        f"there is no recipe {file!r}", fix=f"did you mean {guess!r}?" if guess else f"bundled recipes: {known}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file", fix="name a YAML recipe") from error


def parse(text: str, name: str) -> Source:
    """Parse YAML text.

    Raises:
        ConfigError: it isn't YAML, or not a mapping.
    """
    try:
        data, node = read(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    if data is None:
        raise ConfigError(f"{name} is empty", fix="start from `forge-env config coding_rlvr`")
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: a recipe is a mapping of keys to values, this is a {type(data).__name__}")
    return Source(name, data, dict(_lines(node, ())))


def _lines(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, str(key.value)), key.start_mark.line + 1
            yield from _lines(value, (*path, str(key.value)))


def parse_overrides(arguments: Iterable[str]) -> list[tuple[str, Any]]:
    """`--a.b c`, `--a.b=c` and `a.b=c` as (dotted key, YAML-parsed value), in order.

    Raises:
        UsageError: an argument is none of these.
    """
    result: list[tuple[str, Any]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if match := OVERRIDE.match(argument.removeprefix("--")):
            result.append((match["key"].replace("-", "_"), _value(argument, match["value"])))
        elif argument.startswith("--"):
            if not rest or rest[0].startswith("--"):
                fix = f"write {argument} VALUE"
                raise UsageError(f"{argument} needs a value", fix=fix)
            key = argument.removeprefix("--").replace("-", "_")
            result.append((key, _value(argument, rest.pop(0))))
        else:
            raise UsageError(f"can't understand {argument!r}", fix="overrides are written --a.b VALUE or a.b=VALUE")
    return result


def _value(argument: str, text: str) -> Any:
    try:
        return read(text)[0]
    except yaml.YAMLError as error:
        raise UsageError(f"{argument}: {text!r} is not a YAML value", fix="put it in quotes") from error


def load_config(file: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated recipe.

    Raises:
        ConfigError: the recipe is wrong; every mistake is on a line of its own.
        UsageError: an override can't be parsed.
    """
    return build_config(read_source(file), parse_overrides(overrides))


def build_config(source: Source, overrides: Sequence[tuple[str, Any]] = ()) -> RunConfig:
    """Apply overrides to a recipe and validate it."""
    data = source.data
    overridden: set[KeyPath] = set()
    for key, value in overrides:
        path = tuple(key.split("."))
        data = _replaced(data, path, value, key)
        overridden.add(path)
    try:
        return RunConfig.model_validate(_on_defaults(RunConfig, data))
    except ValidationError as error:
        found = problems(error, source, overridden)
        head = f"{len(found)} mistakes in {source.name}:\n  " if len(found) > 1 else ""
        raise ConfigError(head + "\n  ".join(found)) from error


def _on_defaults(model: type[Section], data: dict[str, Any]) -> dict[str, Any]:
    """Lay a section's given keys over that section's own default, which may differ from its class's."""
    result = dict(data)
    for name, field in model.model_fields.items():
        inner, given = section_of(field.annotation), data.get(name)
        if inner is None or not isinstance(given, dict):
            continue
        default = field.default.model_dump() if isinstance(field.default, Section) else {}
        result[name] = _on_defaults(inner, _merged(default, given))
    return result


def _merged(default: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    result = {**default, **given}
    for key in default.keys() & given.keys():
        if isinstance(default[key], dict) and isinstance(given[key], dict):
            result[key] = _merged(default[key], given[key])
    return result


def _replaced(data: dict[str, Any], path: KeyPath, value: Any, key: str) -> dict[str, Any]:
    """A copy of `data` with `value` at `path`."""
    head, rest = path[0], path[1:]
    if not rest:
        return {**data, head: value}
    inner = data.get(head)
    if inner is not None and not isinstance(inner, dict):
        raise ConfigError(f"--{key}: {head!r} is a value, not a section")
    return {**data, head: _replaced(inner or {}, rest, value, key)}
