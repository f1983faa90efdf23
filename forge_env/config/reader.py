"""The reader of all configuration: recipes, evaluations, options of plug-ins, prices.

    file --read_file--> Source --build--> a validated model --render--> YAML with a comment for every key
    command line --read_arguments--> overrides --^

All error messages have the same form: the location (`file:line`, or the flag as written), the key, the problem, and the
key that was probably meant.
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
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, PlainValidator, ValidationError, WrapValidator
from pydantic.fields import FieldInfo

from forge_env.config import hints
from forge_env.errors import ConfigError, ForgeError, PluginError, UsageError, did_you_mean, in_words, with_place
from forge_env.machine import user_path
from forge_env.plugins import check_registered, load_plugin
from forge_env.reading import LONGEST_NUMBER, is_bounded
from forge_env.redaction import MARK, learn, redact_settings, redacted_keys
from forge_env.schema import KEY as SCHEMA
from forge_env.schema import VERSION, with_schema, without_schema
from forge_env.visible import shown

M = TypeVar("M", bound=BaseModel)
KeyPath: TypeAlias = tuple[str, ...]

# ---
# YAML. As in YAML 1.2, `1e-3` and `0o17` are numbers, and 12:30, 007 and 2024-01-01 are text. Keys are text, and
# duplicates are errors. `yes`, `no`, `on` and `off` are booleans, as in YAML 1.1: as text, all of them would be truthy.

TAG = "tag:yaml.org,2002:"
INTEGER = re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+)$")
"""Excludes `010`, which is 8 in YAML 1.1, and `1:30`, which is 90. A numeric field reads the text 010 as 10."""
FLOAT = re.compile(
    r"^[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)
"""Accepts numbers without a decimal point or without a sign in the exponent, which are text in YAML 1.1."""
CONVERTERS = (BeforeValidator, PlainValidator, WrapValidator)
"""Validators of a field that see its value before pydantic converts it."""
TOML = re.compile(r"""\[[\w."'-]+\]|\[\[[\w."'-]+\]\]|[\w."'-]+\s*=.*""")
"""Pattern of the first line of a TOML file."""
MAX_VALUES = 100_000
"""Maximum keys and values in one file, with aliases expanded."""
MAX_NESTED = 100
"""Maximum nesting depth of lists and mappings in brackets."""
WIDTH = 110
"""Maximum columns of written YAML."""
LARGEST_INTEGER = 2**64 - 1
"""Maximum absolute value of an integer. Larger ones fail in conversions to floats, sizes and times."""
MOST_LISTED = 40
"""Maximum number of known keys that an error about an unknown key lists."""


class Loader(yaml.SafeLoader):
    """YAML loader for configuration."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        """Limit the nesting of brackets: PyYAML's time for each opening bracket grows with the depth."""
        if self.flow_level == MAX_NESTED:
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; duplicate keys, and keys that are lists or mappings, are errors."""
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag in (f"{TAG}bool", f"{TAG}int", f"{TAG}float", f"{TAG}null"):
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

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read an integer of at most 64 bits."""
        value = int(super().construct_yaml_int(node)) if len(node.value) < LONGEST_NUMBER else LARGEST_INTEGER + 1
        if abs(value) > LARGEST_INTEGER:
            raise _too_large(node)
        return value

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Read a number of at most `LARGEST_NUMBER`, or an infinity or NaN that is written as such."""
        value = float(super().construct_yaml_float(node))
        if not is_bounded(value) and node.value.lower().lstrip("+-.") not in ("inf", "nan"):
            raise _too_large(node)
        return value


def _too_large(node: yaml.ScalarNode) -> yaml.MarkedYAMLError:
    shown = node.value if len(node.value) <= 24 else f"{node.value[:20]}... ({len(node.value)} characters)"
    return yaml.MarkedYAMLError(
        problem=f"the number {shown} is too large; a text goes in quotes", problem_mark=node.start_mark
    )


class Dumper(yaml.SafeDumper):
    """YAML dumper whose output `Loader` reads back unchanged."""


for _class in (Loader, Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if tag.removeprefix(TAG) in ("bool", "null", "merge")]
        for first, forms in _class.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver(f"{TAG}int", INTEGER, list("-+0123456789"))
    _class.add_implicit_resolver(f"{TAG}float", FLOAT, list("-+0123456789."))
Loader.add_constructor(f"{TAG}int", Loader.construct_yaml_int)
Loader.add_constructor(f"{TAG}float", Loader.construct_yaml_float)


def read_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """Parse YAML text into a value and its root node, which holds line numbers.

    Raises:
        yaml.YAMLError: the text is not YAML, or has no finite value (a list that contains itself, a number of 5,000
            digits).
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
    """Raise if aliases expand to more than `MAX_VALUES` values: each use of an alias would be visited separately."""
    left = MAX_VALUES
    waiting = [root]
    while waiting:
        node = waiting.pop()
        left -= 1
        if left < 0:
            raise yaml.MarkedYAMLError(
                problem="its aliases expand to an endless or huge document", problem_mark=root.start_mark
            )
        if isinstance(node, yaml.MappingNode):
            waiting += [inner for pair in node.value for inner in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def dump(value: Any) -> str:
    """Write YAML in the order of `value`, without secrets, in ASCII: PyYAML breaks some Unicode line ends."""
    text: str = yaml.dump(redact_settings(value), Dumper=Dumper, sort_keys=False, width=WIDTH)
    return text


# ---
# A source: data with the location of each key.


class Problem(NamedTuple):
    """One mistake: the key, a description, and the dotted keys that were probably meant, the likeliest first."""

    path: KeyPath
    text: str
    meant: Sequence[str] = ()


class InvalidConfigError(ConfigError):
    """Configuration that doesn't fit its model. Each problem is on its own line."""

    source: Source | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Configuration data and the origin of each key."""

    name: str
    """Name of the file, or of the configured part (`environment 'gsm8k'`); empty if the keys are clear without it."""
    data: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """Line of every key in the file."""
    written: Mapping[KeyPath, str] = field(default_factory=dict)
    """Keys from the command line -> their spelling there."""
    spelled: Mapping[KeyPath, str] = field(default_factory=dict)
    """Keys that were translated (`forge_env.config.documents`) -> their spelling in the file."""

    def __post_init__(self) -> None:
        learn(self.data)

    @property
    def stem(self) -> str:
        """Name without folder and `.yaml`, the default name of a run."""
        return Path(self.name).stem

    def line(self, path: KeyPath) -> int:
        """Line of a key, or of its nearest ancestor in the file; 0 if there is none."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 0)

    def with_overrides(self, overrides: Iterable[tuple[str, Any]]) -> Source:
        """Return a copy with values from the command line, by dotted key; the last value of a key wins."""
        data, written = self.data, dict(self.written)
        for key, value in overrides:
            path = tuple(key.split("."))
            data = replaced(data, path, value, key)
            written[path] = key
        return replace(self, data=data, written=written)

    def refuse(self, problems: Iterable[Problem], cause: Exception | None = None) -> InvalidConfigError:
        """Make the error to raise: all problems in the order of the file, those of the command line last."""
        problems = tuple(problems)
        messages = [text for _, _, text in sorted(self._said(problem) for problem in problems)]
        head = f"{len(messages)} mistakes{f' in {self.name}' if self.name else ''}:\n  " if len(messages) > 1 else ""
        error = InvalidConfigError(head + "\n  ".join(messages))
        error.source, error.problems, error.__cause__ = self, problems, cause
        return error

    def _said(self, problem: Problem) -> tuple[bool, int, str]:
        """Message of a problem, after the values to sort it by: whether it is from the command line, and its line."""
        path, line = problem.path, self.line(problem.path)
        above = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.written), None)
        below = any(key[: len(path)] == path for key in self.written)
        words = {**self.spelled, **self.written}
        start = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in words), ())
        shown = ".".join([*filter(None, [words.get(start)]), *path[len(start) :]])
        location = ": ".join(filter(None, [f"{self.name}:{line}" if line else self.name, shown]))
        if forced := above is not None or (below and bool(path)):
            location = f"--{shown}"
        section, as_written = ".".join(path[:-1]), shown.rpartition(".")[0]
        siblings = {key for key in problem.meant if key.rpartition(".")[0] == section}  # get the section's spelling
        keys = [
            ".".join(filter(None, [as_written, key.rpartition(".")[2]])) if key in siblings else key
            for key in problem.meant
        ]
        hint = f" (did you mean {keys[0]}?" if keys else ""
        hint += f" Also possible: {', '.join(keys[1:])}" if keys[1:] else ""
        message = ": ".join(filter(None, [location, problem.text]))
        return forced, line, f"{message}{hint}{')' if hint else ''}"

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add file and line to errors raised inside, when a plug-in validates its own options."""
        try:
            yield
        except InvalidConfigError as error:
            if error.source is None or error.source.name:  # raised for another source
                raise
            raise self.refuse(error.problems, error) from error.__cause__


def replaced(data: dict[str, Any], path: KeyPath, value: Any, key: str) -> dict[str, Any]:
    """Copy `data` with `value` at `path`; `key` is the key as written, for the error."""
    head, rest = path[0], path[1:]
    if not rest:
        return {**data, head: value}
    inner = data.get(head)
    if inner is not None and not isinstance(inner, dict):
        raise ConfigError(f"--{key}: {head!r} is a value, not a section")
    return {**data, head: replaced(inner or {}, rest, value, key)}


def read_file(file: str | Path, bundled: Mapping[str, Traversable] | None = None) -> Source:
    """Read a YAML file, given by path or by the name of a bundled one with or without `.yaml`."""
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
        raise ConfigError(f"{str(file)!r} is a folder", fix="name a YAML file in it")
    beside = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    guess = did_you_mean(name, bundled) or did_you_mean(path.name, beside)
    fix = f"did you mean {guess!r}?" if guess else f"bundled: {', '.join(bundled)}" if bundled else "check the path"
    raise ConfigError(f"there is no file {str(file)!r}", fix=fix)


def parse(text: str, name: str) -> Source:
    """Parse YAML text."""
    try:
        data, node = read_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem, fix = error.problem or error.context or "", _toml_fix(text)
        if "'\\t'" in problem:
            fix = "indent with spaces"
        elif "another document" in problem:
            problem, fix = "a second document begins", "keep one of them"
        raise ConfigError(f"{name}{line}: not valid YAML: {problem}", fix=fix) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    if data is None:
        raise ConfigError(f"{name} is empty", fix="write `key: value` in it; `forge-env config` shows an example")
    if not isinstance(data, dict):
        message = f"{name}: should be a mapping of keys to values, not a {type(data).__name__}"
        raise ConfigError(message, fix=_toml_fix(text))
    return Source(name, without_schema(data, name), dict(_lines(node, ())))


def _toml_fix(text: str) -> str | None:
    """Return advice if a text looks like TOML, else None."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    if not TOML.fullmatch(first.strip()) or "=" not in text:
        return None
    return (
        "it looks like TOML; in YAML, `key = value` is `key: value`, and `[section]` is `section:` above indented keys"
    )


def _lines(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    inner: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        inner = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inner = [(str(index), value, value) for index, value in enumerate(node.value)]
    for name, position, value in inner:
        yield (*path, name), position.start_mark.line + 1
        yield from _lines(value, (*path, name))


# ---
# The command line: `--a.b c`, `--a.b=c` and `a.b=c` set a key; in its name, `-` is the same as `_`.

OVERRIDE = re.compile(r"^(--)?(?P<key>[A-Za-z_][\w:-]*(\.[\w:-]+)*)=(?P<value>.*)$", re.DOTALL)


class Override(NamedTuple):
    """A key that is set on the command line."""

    written: str
    """The key as written, without leading dashes."""
    text: str
    flag: bool
    """Whether it was written with leading dashes."""

    @property
    def key(self) -> str:
        """The dotted key, with `_` for `-`."""
        return self.written.replace("-", "_")

    def value(self, model: Any = None) -> Any:
        """Parse the text as YAML; for a text field of `model`, return unquoted text unchanged."""
        known = _at(model, tuple(self.key.split(".")))
        kinds = {kind for info in known for kind in _members(info.annotation)}
        if kinds and kinds <= {str, Path, type(None)} and self.text[:1] not in ("'", '"'):
            return None if self.text == "null" and type(None) in kinds else self.text
        try:
            return read_yaml(self.text)[0]
        except yaml.YAMLError as error:
            raise UsageError(f"--{self.key}: {shown(self.text)} is not a YAML value", fix="put it in quotes") from error


def read_arguments(given: Iterable[str], short: Mapping[str, str] | None = None) -> tuple[list[str], list[Override]]:
    """Split a command line into words and overrides; `short` maps letters to keys, for `-n 5` and `-n5`."""
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
    """Parse arguments that must all be overrides into dotted keys and values."""
    words, overrides = read_arguments(arguments)
    if words:
        raise not_understood(words[0])
    return values(overrides, model)


def values(overrides: Iterable[Override], model: Any = None) -> list[tuple[str, Any]]:
    """Dotted keys with their parsed values."""
    return [(override.key, override.value(model)) for override in overrides]


def not_understood(word: str) -> UsageError:
    """Make the error for a word that the command line doesn't accept."""
    return UsageError(f"can't understand {word!r}", fix="a key is set with --a.b VALUE or a.b=VALUE")


# ---
# Validation, and its error messages.


def read_as(model: type[M], file: str | Path) -> M:
    """Read a YAML file and validate it as `model`."""
    return build(model, read_file(file))


def build(model: type[M], source: Source, overrides: Iterable[tuple[str, Any]] = ()) -> M:
    """Apply overrides to a source and validate it.

    Raises:
        ConfigError: the configuration is invalid; each mistake is on its own line.
    """
    source = source.with_overrides(overrides)
    return validate(model, _on_defaults(model, source.data), source)


def validate(model: type[M], data: Any, source: Source, at: KeyPath = ()) -> M:
    """Validate `data`, the value of the key `at` in `source`, as a model."""
    booleans = [*_booleans(model, data, at)]
    try:
        result = model.model_validate(data)
    except ValidationError as error:
        mistakes = [*problems(error, model, data, at)]
        reported = {problem.path for problem in mistakes}
        mistakes += [problem for problem in booleans if problem.path not in reported]
        raise source.refuse(mistakes, error) from error
    if booleans:
        raise source.refuse(booleans)
    return result


def _booleans(model: Any, data: Any, at: KeyPath) -> Iterator[Problem]:
    """Yield a problem for each boolean in `data` that should be a number; pydantic would convert it to 0 or 1."""
    for name, info in fields_of(model).items() if isinstance(data, Mapping) else ():
        if info is not None and not any(isinstance(each, CONVERTERS) for each in info.metadata):
            yield from _booleans_in(info.annotation, data.get(name), (*at, name))


def _booleans_in(annotation: Any, value: Any, at: KeyPath) -> Iterator[Problem]:
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in _members(annotation)]
    if isinstance(value, bool):
        if {int, float}.intersection(kinds) and not any(map(_takes_booleans, kinds)):
            yield Problem(at, f"should be a number, not {value}")
    elif isinstance(value, Mapping):
        sections = [kind for kind in kinds if kind is not NoneType]
        if len(sections) == 1:  # of several, only pydantic knows which one it chooses
            yield from _booleans(sections[0], value, at)
    elif isinstance(value, list | tuple):
        for kind in kinds:
            if isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Sequence):
                members = get_args(kind)
                fixed = get_origin(kind) is tuple and Ellipsis not in members
                for index, (item, member) in enumerate(
                    zip(value, members if fixed else repeat(members[0]), strict=False)
                ):
                    yield from _booleans_in(member, item, (*at, str(index)))


def _takes_booleans(kind: Any) -> bool:
    """Whether a type is one of booleans, or of anything."""
    return kind in (bool, Any, object) or (
        get_origin(kind) is Literal and any(isinstance(value, bool) for value in get_args(kind))
    )


def construct(make: Callable[..., Any], options: dict[str, Any], at: str = "", owner: str = "") -> Any:
    """Call `make(**options)` after checking the options: for plug-ins whose options are arguments (losses, rules,
    engines).

    Args:
        at: dotted key of the options, if they come from a file.
        owner: name of the plug-in to use in errors, if they don't.

    Raises:
        InvalidConfigError: an option is unknown, missing or wrong.
        UsageError: `make` itself raised an exception; its message is quoted.
    """
    path, source = tuple(filter(None, at.split("."))), Source(owner, {})
    known, accepts_any = arguments(make)
    mistakes = [] if accepts_any else unknown(options, known, path)
    needed = [name for name, default in known.items() if default is inspect.Parameter.empty]
    mistakes += [_missing((*path, name)) for name in needed if name not in options]
    mistakes += _booleans(make, options, path)
    if mistakes:
        raise source.refuse(mistakes)
    try:
        return make(**options)
    except ValidationError as error:
        raise source.refuse(problems(error, make, options, path), error) from error
    except ForgeError:
        raise
    except Exception as error:  # a plug-in's constructor may raise anything
        about_them = isinstance(error, ValueError | TypeError | OSError)  # otherwise it is a bug of the constructor
        reason = error if about_them else with_place(error)
        fix = f"its options: {', '.join(known) or 'none'}"
        raise UsageError(f"{at or owner}: {options} is rejected: {reason}", fix=fix) from error


def arguments(make: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Parameters of a callable with their defaults (or `Parameter.empty`), and whether it accepts any other keyword."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return {}, True
    named = {item.name: item.default for item in parameters if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)}
    return named, any(item.kind is item.VAR_KEYWORD for item in parameters)


def unknown(given: Iterable[str], known: Collection[str], at: KeyPath) -> list[Problem]:
    """List a problem for each given name below the key `at` that is not known there."""
    wrong = [(*at, name) for name in given if name not in known]
    if not known:
        return [Problem(path, "unknown key (known here: none)") for path in wrong]
    return [problem for path in wrong for problem in _unknown(path, known)]


def _missing(path: KeyPath, example: str = "VALUE") -> Problem:
    return Problem(path, f"missing (add it, for example `{path[-1]}: {example}`)")


def problems(error: ValidationError, model: Any, data: Any, at: KeyPath = ()) -> Iterator[Problem]:
    """Yield every mistake that pydantic reports in `data`, the value of the key `at`."""
    for item in error.errors(include_url=False):
        inner = _written(item["loc"], data)
        path = (*at, *inner)
        text = in_words(item)
        if text == "unknown key":
            known = dict.fromkeys(name for each in _models(model, inner[:-1]) for name in fields_of(each))
            method = str(data.get("method", "")) if isinstance(data, dict) else ""
            yield from _unknown(path, known, model if not at else None, item["input"], method)
        elif text == "missing":
            examples = [example for each in _at(model, inner) for example in each.examples or ()]
            yield _missing(path, *examples[:1])
        elif isinstance(item["input"], bool | int | float) and (item["type"] == "string_type" or "'" in text):
            yield Problem(path, f"{text}: quote it")
        elif item["type"] == "model_type" and isinstance(item["input"], str) and (name := _main_key(model, inner)):
            yield Problem(path, f"{text} (write `{path[-1]}: {{{name}: {item['input']}}}`)")
        else:
            yield Problem(path, text)


def _main_key(model: Any, path: KeyPath) -> str | None:
    """Return the key of a section that a plain value is probably meant for, such as `name` in `loss: gspo`."""
    known = {name for kind in _models(model, path) for name in fields_of(kind)}
    return next((name for name in ("name", "path", "engine", "rank") if name in known), None)


def _unknown(
    path: KeyPath, known: Collection[str], model: Any = None, value: Any = None, method: str = ""
) -> Iterator[Problem]:
    """Describe an unknown key; if it is a section of another library, describe the keys in it that have a hint."""
    section, *names = path[-1].split(".")
    if names and section in known:
        nested = "".join(f"{{{name}: " for name in names) + "VALUE" + "}" * len(names)
        yield Problem(path, f"unknown key (write `{section}: {nested}`)")
        return
    every = list(keys(model)) if model is not None else [".".join([*path[:-1], name]) for name in known]
    inner = [(*path, *key) for key in _leaves(value)]
    hinted = [Problem(key, "unknown key", meant) for key in inner if (meant := hints.meant(key, (), every, method))]
    if hinted:
        yield from hinted
    elif meant := hints.meant(path, known, every, method):
        yield Problem(path, "unknown key", meant)
    else:
        listed = 0 < len(known) <= MOST_LISTED
        yield Problem(path, f"unknown key (known here: {', '.join(known)})" if listed else "unknown key")


def _leaves(value: Any) -> Iterator[KeyPath]:
    """Yield the paths of all values in nested mappings."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict):
            yield from ((str(name), *path) for path in _leaves(inner))
        else:
            yield (str(name),)


def _written(loc: Sequence[int | str], data: Any) -> KeyPath:
    """Convert a pydantic error location to a key, without union members' names, which are not in the data."""
    path: list[str] = []
    for index, part in enumerate(loc):
        inner = dict(enumerate(data)) if isinstance(data, list | tuple) else data if isinstance(data, dict) else {}
        if part not in inner and (index < len(loc) - 1 or not isinstance(data, dict)):
            continue
        data = inner.get(part)
        path.append(str(part))
    return tuple(path)


def texts(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in nested settings, with its dotted key."""
    if isinstance(settings, str):
        yield key, settings
    elif isinstance(settings, Mapping):
        for name, item in settings.items():
            yield from texts(item, f"{key}.{name}".lstrip("."))
    elif isinstance(settings, list | tuple):
        for item in settings:
            yield from texts(item, key)


# ---
# Recorded settings, which hold no secrets.


def refuse_redacted(settings: Any, fix: str | None = None) -> None:
    """Raise if recorded settings still hold redaction marks in place of their secrets.

    Args:
        fix: advice in the error; None: give the keys on the command line.

    Raises:
        UsageError: a secret is missing; the error names the keys.
    """
    keys = list(redacted_keys(settings))
    if keys:
        raise UsageError(
            f"{', '.join(keys)}: secrets are not recorded, so set this again",
            fix=fix or f"add {keys[0]}=VALUE; code can also read its secrets from environment variables",
        )


def same_settings(recorded: Any, given: Any) -> bool:
    """Whether recorded and given settings are equal, ignoring secrets, which are not recorded."""
    one, other = (MARK.sub("", json.dumps(redact_settings(value), default=repr)) for value in (recorded, given))
    return one == other


# ---
# Keys of a model: fields of pydantic models and pydantic dataclasses, or the arguments of any other callable.


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model class in `X` or `X | None`, or None for a plain value."""
    for candidate in _members(annotation):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    """Members of a union, or the type itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def keys(model: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a model in order of definition; a section precedes the keys in it."""
    for name, info in fields_of(model).items():
        yield prefix + name
        if info is not None and (inner := section_of(info.annotation)):
            yield from keys(inner, f"{prefix}{name}.")


def fields_of(model: Any) -> Mapping[str, FieldInfo | None]:
    """Keys of a model with their pydantic fields; None for arguments of a plain callable."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return model.model_fields
    known: Mapping[str, FieldInfo] | None = getattr(model, "__pydantic_fields__", None)
    return known or dict.fromkeys(arguments(model)[0] if callable(model) else ())


def _at(model: Any, path: KeyPath) -> list[FieldInfo]:
    """Fields of a key: one for each model that may hold it, several in case of a union."""
    fields = (fields_of(kind).get(path[-1]) for kind in _models(model, path[:-1]))
    return [info for info in fields if info is not None]


def _models(model: Any, path: KeyPath) -> list[Any]:
    """Possible models of the value at a key."""
    path = tuple(part for part in path if not part.isdigit())  # without indices of lists
    return [kind for info in _at(model, path) for kind in _classes(info.annotation)] if path else [model]


def _classes(annotation: Any) -> Iterator[Any]:
    """Yield the models named in a type at any depth: `list[X]`, `X | Y`, `Annotated[X, ...]`."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    for part in get_args(annotation):
        yield from _classes(part)


def _on_defaults(model: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    """Merge the given keys of each section into the section's default, which may differ from its class's defaults."""
    result = dict(data)
    for name, info in model.model_fields.items():
        given = data.get(name)
        if not isinstance(given, dict) or (inner := section_of(info.annotation)) is None:
            continue
        default = info.default.model_dump(exclude_unset=True) if isinstance(info.default, BaseModel) else {}
        result[name] = _on_defaults(inner, _merged(default, given))
    return result


def _merged(default: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    result = {**default, **given}
    for key in default.keys() & given.keys():
        if isinstance(default[key], dict) and isinstance(given[key], dict):
            result[key] = _merged(default[key], given[key])
    return result


# ---
# Writing YAML, with the documentation of every key.


def render(config: BaseModel) -> str:
    """Write a configuration as YAML with comments; reading it back gives an equal one."""
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
        elif value is None or type(value) in (bool, int):  # same result as `dump`, 100 times as fast
            yield f"{pad}{name}: {json.dumps(value)}"
        else:
            yield from (f"{pad}{line}" for line in dump({name: value}).rstrip("\n").split("\n"))


def changed_yaml(config: BaseModel, always: Iterable[str] = ()) -> str:
    """Write only the keys that differ from their defaults, and the keys in `always`."""
    data = config.model_dump(mode="json", exclude_defaults=True)
    data |= config.model_dump(mode="json", include=set(always))
    return dump(with_schema(data))


def make_plugin(
    group: str,
    name: str,
    options: dict[str, Any],
    *,
    name_at: str,
    options_at: str,
    own: Mapping[str, Any] | None = None,
) -> Any:
    """Call the class (or function) registered as `name` with its options, and return the result.

    Args:
        name: registered name, or import path `module:attribute`.
        own: built-in classes by name, which need no entry point.

    Raises:
        NotRegisteredError: there is no plug-in of that name.
        PluginError: it can't be imported, is not a class, or its result is not callable.
        UsageError: it doesn't accept these options.
    """
    own = own or {}
    check_registered(group, name, own)
    make = own[name] if name in own else load_plugin(group, name)
    if not callable(make):
        raise PluginError(f"{name_at}: {name!r} is not a class")
    made = construct(make, options, options_at)
    if not callable(made):
        raise PluginError(f"{name_at}: {name!r} makes a {type(made).__name__}, which can't be called")
    return made
