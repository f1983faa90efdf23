"""The one reader of everything that is configured: recipes, evaluations, options of plug-ins, prices.

    file --read_file--> Source --build--> a validated model --render--> YAML that explains every key
    command line --read_arguments--> overrides --^

A mistake is said in the same words wherever it is made: where it stands (`file:line`, or the flag as written), the key,
what is wrong, and what was probably meant.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from forge_env.errors import ConfigError, ForgeError, UsageError, did_you_mean, in_words, with_place
from forge_env.machine import user_path
from forge_env.redaction import MARK, learn, redact_settings
from forge_env.schema import KEY as SCHEMA
from forge_env.schema import VERSION, with_schema, without_schema

M = TypeVar("M", bound=BaseModel)
KeyPath: TypeAlias = tuple[str, ...]

# ---
# YAML, where `1e-3` and `0o17` are numbers, and 12:30, 007 and 2024-01-01 are text, as in YAML 1.2. Keys are text,
# and duplicates are errors. `yes`, `no`, `on` and `off` stay true and false, as in YAML 1.1: as texts, all would be
# truthy.

TAG = "tag:yaml.org,2002:"
INTEGER = re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+)$")
"""Without `010`, which is 8 in YAML 1.1, and `1:30`, which is 90. A field that holds a number reads 010 as 10."""
FLOAT = re.compile(
    r"^[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)
"""Also without a decimal point, or without a sign in the exponent: these are text in YAML 1.1."""
MAX_VALUES = 100_000
"""Keys and values in one file, aliases written out."""
MAX_NESTED = 100
"""Lists and mappings in brackets, one in the other."""
WIDTH = 110
"""Columns of the YAML that is written."""
MOST_LISTED = 40
"""Known keys that are listed beside an unknown one."""


class Loader(yaml.SafeLoader):
    """Reads configuration."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        """Begin a list or mapping in brackets, which takes PyYAML as long as there are others around it."""
        if self.flow_level == MAX_NESTED:
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a key that is given twice is an error, and so is one that is not a plain value."""
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{TAG}bool":
                key_node.tag = f"{TAG}str"
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key is a name, not a list or mapping", problem_mark=key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back unchanged."""


for _class in (Loader, Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if tag.removeprefix(TAG) in ("bool", "null", "merge")]
        for first, forms in _class.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver(f"{TAG}int", INTEGER, list("-+0123456789"))
    _class.add_implicit_resolver(f"{TAG}float", FLOAT, list("-+0123456789."))


def read_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """The value that YAML text spells, and its nodes, which know their lines.

    Raises:
        yaml.YAMLError: it is not YAML, or not a value (a list that contains itself, a number of 5,000 digits).
    """
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _bounded(node)
        return loader.construct_document(node), node
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except ValueError as error:  # a number that is too long
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def _bounded(root: yaml.Node) -> None:
    """Refuse text whose aliases spell more values than anyone writes: each would be visited as often as it stands."""
    left = MAX_VALUES
    waiting = [root]
    while waiting:
        node = waiting.pop()
        left -= 1
        if left < 0:
            raise yaml.MarkedYAMLError(
                problem="its aliases make it endless, or nearly so", problem_mark=root.start_mark
            )
        if isinstance(node, yaml.MappingNode):
            waiting += [inner for pair in node.value for inner in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def dump(value: Any) -> str:
    """YAML text in the order of `value`, without secrets; in ASCII: PyYAML breaks some Unicode line ends otherwise."""
    text: str = yaml.dump(redact_settings(value), Dumper=Dumper, sort_keys=False, width=WIDTH)
    return text


# ---
# A source: data, and where each of its keys stands.


class Problem(NamedTuple):
    """One mistake: the key, what is wrong with it, and the key that was probably meant."""

    path: KeyPath
    text: str
    meant: KeyPath = ()


class InvalidConfigError(ConfigError):
    """Configuration that doesn't fit its model. Every problem is on a line of its own."""

    source: Source | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """What was configured: the data, and where every key of it comes from."""

    name: str
    """Of the file, or of what is configured (`environment 'gsm8k'`); empty where the keys say enough."""
    data: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """Line of every key in the file."""
    written: Mapping[KeyPath, str] = field(default_factory=dict)
    """Keys from the command line, as they were written there."""
    spelled: Mapping[KeyPath, str] = field(default_factory=dict)
    """Keys of the file that it has in other words: those."""

    def __post_init__(self) -> None:
        learn(self.data)

    @property
    def stem(self) -> str:
        """Name without folder and `.yaml`: what a run is called by default."""
        return Path(self.name).stem

    def line(self, path: KeyPath) -> int:
        """Line of a key, or of the nearest key above it; 0 when none stands in the file."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 0)

    def with_overrides(self, overrides: Iterable[tuple[str, Any]]) -> Source:
        """The same with values from the command line, by dotted key; the last one counts."""
        data, written = self.data, dict(self.written)
        for key, value in overrides:
            path = tuple(key.split("."))
            data = replaced(data, path, value, key)
            written[path] = key
        return replace(self, data=data, written=written)

    def refuse(self, problems: Iterable[Problem], cause: Exception | None = None) -> InvalidConfigError:
        """The error to raise: all problems in the order of the file, those of the command line last."""
        problems = tuple(problems)
        said = [text for _, _, text in sorted(self._said(problem) for problem in problems)]
        head = f"{len(said)} mistakes{f' in {self.name}' if self.name else ''}:\n  " if len(said) > 1 else ""
        error = InvalidConfigError(head + "\n  ".join(said))
        error.source, error.problems, error.__cause__ = self, problems, cause
        return error

    def _said(self, problem: Problem) -> tuple[bool, int, str]:
        path, line = problem.path, self.line(problem.path)
        above = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.written), None)
        below = any(key[: len(path)] == path for key in self.written)
        words = {**self.spelled, **self.written}
        start = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in words), ())
        shown = ".".join([*filter(None, [words.get(start)]), *path[len(start) :]])
        place = ": ".join(filter(None, [f"{self.name}:{line}" if line else self.name, shown]))
        if forced := above is not None or (below and bool(path)):
            place = f"--{shown}"
        meant = ".".join(problem.meant)
        if problem.meant and problem.meant[:-1] == path[:-1]:  # a neighbour: in the words of the person who wrote it
            meant = ".".join(filter(None, [shown.rpartition(".")[0], problem.meant[-1]]))
        return forced, line, f"{place}: {problem.text}{f' (did you mean {meant}?)' if meant else ''}"

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Name file and line of mistakes that are found later, in options that a plug-in checks itself."""
        try:
            yield
        except InvalidConfigError as error:
            if error.source is None or error.source.name:  # of something else
                raise
            raise self.refuse(error.problems, error) from error.__cause__


def replaced(data: dict[str, Any], path: KeyPath, value: Any, key: str) -> dict[str, Any]:
    """A copy of `data` with `value` at `path`, which was written as `key`."""
    head, rest = path[0], path[1:]
    if not rest:
        return {**data, head: value}
    inner = data.get(head)
    if inner is not None and not isinstance(inner, dict):
        raise ConfigError(f"--{key}: {head!r} is a value, not a section")
    return {**data, head: replaced(inner or {}, rest, value, key)}


def read_file(file: str | Path, bundled: Mapping[str, Traversable] | None = None) -> Source:
    """Read a YAML file: a path, or the name of a bundled one with or without `.yaml`.

    Raises:
        ConfigError: there is no such file, or it is not a YAML mapping.
    """
    path, bundled = user_path(str(file)), bundled or {}
    if path.is_file():
        try:
            return parse(path.read_text(encoding="utf-8"), str(file))
        except OSError as error:
            raise ConfigError(f"can't read {path}: {error.strerror}", fix="check its permissions") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not a text file", fix="name a YAML file") from error
    if (name := str(file).removesuffix(".yaml")) in bundled:
        return parse(bundled[name].read_text(encoding="utf-8"), f"{name}.yaml")
    if path.is_dir():
        raise ConfigError(f"{file} is a folder", fix="name a YAML file in it")
    beside = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    guess = did_you_mean(name, bundled) or did_you_mean(path.name, beside)
    fix = f"did you mean {guess!r}?" if guess else f"bundled: {', '.join(bundled)}" if bundled else "check the path"
    raise ConfigError(f"there is no file {str(file)!r}", fix=fix)


def parse(text: str, name: str) -> Source:
    """Parse YAML text.

    Raises:
        ConfigError: it isn't YAML, or not a mapping.
        UsageError: it is of a newer version than can be read.
    """
    try:
        data, node = read_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    if data is None:
        raise ConfigError(f"{name} is empty", fix="write `key: value` in it; `forge-env config` shows an example")
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: should be a mapping of keys to values, not a {type(data).__name__}")
    return Source(name, without_schema(data, name), dict(_lines(node, ())))


def _lines(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    inner: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        inner = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inner = [(str(index), value, value) for index, value in enumerate(node.value)]
    for name, place, value in inner:
        yield (*path, name), place.start_mark.line + 1
        yield from _lines(value, (*path, name))


# ---
# The command line: `--a.b c`, `--a.b=c` and `a.b=c` set a key; `-` in its name is as good as `_`.

OVERRIDE = re.compile(r"^(--)?(?P<key>[A-Za-z_][\w:-]*(\.[\w:-]+)*)=(?P<value>.*)$", re.DOTALL)


class Override(NamedTuple):
    """A key that is set on the command line."""

    written: str
    """The key as written, without dashes before it."""
    text: str
    flag: bool
    """Whether it was written with dashes before it."""

    @property
    def key(self) -> str:
        """The dotted key."""
        return self.written.replace("-", "_")

    def value(self, model: Any = None) -> Any:
        """What the text stands for: YAML; where the key of `model` holds text, the text as it is, unless it is quoted.

        Raises:
            UsageError: it is not a YAML value.
        """
        known = _at(model, tuple(self.key.split(".")))
        kinds = {kind for info in known for kind in _members(info.annotation)}
        if kinds and kinds <= {str, Path, type(None)} and self.text[:1] not in ("'", '"'):
            return None if self.text == "null" and type(None) in kinds else self.text
        try:
            return read_yaml(self.text)[0]
        except yaml.YAMLError as error:
            raise UsageError(f"--{self.key}: {self.text!r} is not a YAML value", fix="put it in quotes") from error


def read_arguments(given: Iterable[str], short: Mapping[str, str] | None = None) -> tuple[list[str], list[Override]]:
    """Plain words and overrides of a command line, each in order.

    Args:
        given: what the command's own flags have left.
        short: key by letter, for `-n 5` and `-n5`.

    Raises:
        UsageError: a flag has no value.
    """
    words: list[str] = []
    overrides: list[Override] = []
    rest = list(given)
    while rest:
        argument = rest.pop(0)
        if match := OVERRIDE.match(argument):
            overrides.append(Override(match["key"], match["value"], argument.startswith("--")))
        elif short and argument[:1] == "-" and argument[1:2] in short:
            text = argument[2:] or _next(argument, rest)
            overrides.append(Override(short[argument[1]], text, True))
        elif argument.startswith("-") and argument != "-":
            overrides.append(Override(argument.lstrip("-"), _next(argument, rest), True))
        else:
            words.append(argument)
    return words, overrides


def _next(argument: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise UsageError(f"{argument} needs a value", fix=f"write {argument} VALUE")
    return rest.pop(0)


def parse_overrides(arguments: Iterable[str], model: Any = None) -> list[tuple[str, Any]]:
    """Dotted keys and values, where nothing but overrides is expected.

    Raises:
        UsageError: an argument is not an override.
    """
    words, overrides = read_arguments(arguments)
    if words:
        raise not_understood(words[0])
    return values(overrides, model)


def values(overrides: Iterable[Override], model: Any = None) -> list[tuple[str, Any]]:
    """Dotted keys with what their texts stand for."""
    return [(override.key, override.value(model)) for override in overrides]


def not_understood(word: str) -> UsageError:
    """For a word that has no place on the command line."""
    return UsageError(f"can't understand {word!r}", fix="a key is set with --a.b VALUE or a.b=VALUE")


# ---
# Validating, and saying what is wrong.


def read_as(model: type[M], file: str | Path) -> M:
    """Read and validate."""
    return build(model, read_file(file))


def build(model: type[M], source: Source, overrides: Iterable[tuple[str, Any]] = ()) -> M:
    """Apply overrides and validate.

    Raises:
        ConfigError: something is wrong; every mistake is on a line of its own.
    """
    source = source.with_overrides(overrides)
    return validate(model, _on_defaults(model, source.data), source)


def validate(model: type[M], data: Any, source: Source, at: KeyPath = ()) -> M:
    """`data`, which stands at the key `at` of `source`, as a model."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise source.refuse(problems(error, model, data, at), error) from error


def construct(make: Callable[..., Any], options: dict[str, Any], at: str = "", owner: str = "") -> Any:
    """`make(**options)`: how plug-ins whose options are arguments (losses, rules, engines) get theirs.

    Args:
        make: a class or function; its signature says which options there are.
        options: what was configured.
        at: dotted key that the options stand at, where they come from a file.
        owner: whose options they are, where they don't.

    Raises:
        InvalidConfigError: an option is unknown, missing or wrong.
        UsageError: the class refuses them in words of its own.
    """
    path, source = tuple(filter(None, at.split("."))), Source(owner, {})
    known, accepts_any = arguments(make)
    found = [] if accepts_any else unknown(options, known, path)
    needed = [name for name, default in known.items() if default is inspect.Parameter.empty]
    found += [_missing((*path, name)) for name in needed if name not in options]
    if found:
        raise source.refuse(found)
    try:
        return make(**options)
    except ValidationError as error:
        raise source.refuse(problems(error, make, options, path), error) from error
    except ForgeError:
        raise
    except Exception as error:  # whatever somebody's constructor says about its options
        about_them = isinstance(error, ValueError | TypeError | OSError)  # else it has a mistake of its own
        said = error if about_them else with_place(error)
        fix = f"its options: {', '.join(known) or 'none'}"
        raise UsageError(f"{at or owner}: {options} is rejected: {said}", fix=fix) from error


def arguments(make: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Defaults of what a callable takes (`inspect.Parameter.empty`: none), and whether it takes any other name too."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return {}, True
    named = {item.name: item.default for item in parameters if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)}
    return named, any(item.kind is item.VAR_KEYWORD for item in parameters)


def unknown(given: Iterable[str], known: Collection[str], at: KeyPath) -> list[Problem]:
    """Problems with the names that are given below the key `at` and not known there."""
    wrong = [(*at, name) for name in given if name not in known]
    return [_unknown(path, known) if known else Problem(path, "unknown key (known here: none)") for path in wrong]


def _missing(path: KeyPath, example: str = "VALUE") -> Problem:
    return Problem(path, f"missing (add it, for example `{path[-1]}: {example}`)")


def problems(error: ValidationError, model: Any, data: Any, at: KeyPath = ()) -> Iterator[Problem]:
    """Every mistake that pydantic found in `data`, which stands at the key `at`."""
    for item in error.errors(include_url=False):
        inner = _written(item["loc"], data)
        path = (*at, *inner)
        text = in_words(item)
        if text == "unknown key":
            known = dict.fromkeys(name for each in _models(model, inner[:-1]) for name in fields_of(each))
            yield _unknown(path, known, model if not at else None)
        elif text == "missing":
            examples = [example for each in _at(model, inner) for example in each.examples or ()]
            yield _missing(path, *examples[:1])
        elif isinstance(item["input"], bool | int | float) and (item["type"] == "string_type" or "'" in text):
            yield Problem(path, f"{text}: quote it")
        else:
            yield Problem(path, text)


def _unknown(path: KeyPath, known: Iterable[str], model: Any = None) -> Problem:
    """What the unknown key was probably meant to be: a neighbour first, else the same name elsewhere in the model."""
    known = list(known)
    if guess := did_you_mean(path[-1], known):
        return Problem(path, "unknown key", (*path[:-1], guess))
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(list(keys(model)))} if model is not None else {}
    if guess := did_you_mean(path[-1], elsewhere):
        return Problem(path, "unknown key", tuple(elsewhere[guess].split(".")))
    listed = 0 < len(known) <= MOST_LISTED
    return Problem(path, f"unknown key (known here: {', '.join(known)})" if listed else "unknown key")


def _written(loc: Sequence[int | str], data: Any) -> KeyPath:
    """A place in pydantic's words as a key: without the names of a union's members, which nobody wrote."""
    path: list[str] = []
    for index, part in enumerate(loc):
        inner = dict(enumerate(data)) if isinstance(data, list | tuple) else data if isinstance(data, dict) else {}
        if part not in inner and (index < len(loc) - 1 or not isinstance(data, dict)):
            continue
        data = inner.get(part)
        path.append(str(part))
    return tuple(path)


# ---
# Settings that were recorded: their secrets were left out.


def refuse_redacted(settings: Any, fix: str | None = None) -> None:
    """Refuse settings that were recorded without their secrets, if these were not given again.

    Args:
        settings: by key.
        fix: what to do; None: give them on the command line.

    Raises:
        UsageError: it names the keys.
    """
    keys = list(_redacted(settings))
    if keys:
        raise UsageError(
            f"{', '.join(keys)}: secrets are not recorded, so this has to be given again",
            fix=fix or f"add {keys[0]}=VALUE; code can also read its secrets from environment variables",
        )


def _redacted(value: Any, key: str = "") -> Iterator[str]:
    """Dotted keys of values that were redacted."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _redacted(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _redacted(item, f"{key}.{number}")
    elif isinstance(value, str) and MARK.search(value):
        yield key


def same_settings(recorded: Any, given: Any) -> bool:
    """Whether recorded settings are the given ones, secrets aside: recorded ones are not known."""
    one, other = (MARK.sub("", json.dumps(redact_settings(value), default=repr)) for value in (recorded, given))
    return one == other


# ---
# What a model says of its keys: pydantic models, dataclasses of pydantic, and the arguments of anything else.


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model in `X` or `X | None`, or None for a plain value."""
    for candidate in _members(annotation):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    """Types that a value may be of."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def keys(model: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a model, nearest to the root first within a section."""
    for name, info in fields_of(model).items():
        yield prefix + name
        if info is not None and (inner := section_of(info.annotation)):
            yield from keys(inner, f"{prefix}{name}.")


def fields_of(model: Any) -> Mapping[str, FieldInfo | None]:
    """The keys of a model, with what pydantic knows of them: nothing where they are arguments of something else."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return model.model_fields
    known: Mapping[str, FieldInfo] | None = getattr(model, "__pydantic_fields__", None)
    return known or dict.fromkeys(arguments(model)[0] if callable(model) else ())


def _at(model: Any, path: KeyPath) -> list[FieldInfo]:
    """What is known of a key: of each model that may hold it, where a union or a list leaves several."""
    found = (fields_of(kind).get(path[-1]) for kind in _models(model, path[:-1]))
    return [info for info in found if info is not None]


def _models(model: Any, path: KeyPath) -> list[Any]:
    """Models that the value at a key may be of."""
    path = tuple(part for part in path if not part.isdigit())  # a list's index
    return [kind for info in _at(model, path) for kind in _classes(info.annotation)] if path else [model]


def _classes(annotation: Any) -> Iterator[Any]:
    """Models named in a type, however deep: `list[X]`, `X | Y`, `Annotated[X, ...]`."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    for part in get_args(annotation):
        yield from _classes(part)


def _on_defaults(model: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    """Lay a section's given keys over that section's own default, which may differ from its class's."""
    result = dict(data)
    for name, info in model.model_fields.items():
        inner, given = section_of(info.annotation), data.get(name)
        if inner is None or not isinstance(given, dict):
            continue
        default = info.default.model_dump() if isinstance(info.default, BaseModel) else {}
        result[name] = _on_defaults(inner, _merged(default, given))
    return result


def _merged(default: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    result = {**default, **given}
    for key in default.keys() & given.keys():
        if isinstance(default[key], dict) and isinstance(given[key], dict):
            result[key] = _merged(default[key], given[key])
    return result


# ---
# Back to YAML, every key with its documentation.


def render(config: BaseModel) -> str:
    """The configuration with comments; reading it back gives an equal one."""
    head = [f"# {line}" for line in (type(config).__doc__ or "").strip().splitlines()]
    version = ["", "# Version of this file's format.", f"{SCHEMA}: {VERSION}"]
    return "\n".join([*head, *version, *_section(config, 0)]) + "\n"


def _section(section: BaseModel, indent: int) -> Iterator[str]:
    pad = " " * indent
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if section_of(info.annotation) is not None and indent == 0:
            yield ""
        for line in textwrap.wrap(info.description or "", WIDTH - indent):
            yield f"{pad}# {line}"
        if isinstance(value, BaseModel):
            yield f"{pad}{name}:"
            yield from _section(value, indent + 2)
        elif value is None or type(value) in (bool, int):  # as below, in a hundredth of the time
            yield f"{pad}{name}: {json.dumps(value)}"
        else:
            yield from (f"{pad}{line}" for line in dump({name: value}).rstrip("\n").split("\n"))


def changed_yaml(config: BaseModel, always: Iterable[str] = ()) -> str:
    """Only the keys that are not at their defaults, and those that `always` names."""
    data = config.model_dump(mode="json", exclude_defaults=True)
    data |= config.model_dump(mode="json", include=set(always))
    return dump(with_schema(data))
