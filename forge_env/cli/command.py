"""Code shared by the commands of `forge-env`: the argument parser, common arguments, and error messages.

A command is a module of this folder with the command's name. `add_arguments(parser)` defines its arguments and
`run(args)` executes it; the module is imported only when its command is used.

    add_arguments: parser.word(...)          positional words, in args.words
                   parser.keys(MODEL)        configuration keys, in args.overrides; documented by the model's fields
                   parser.add_argument(...)  flags of the command
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from forge_env.errors import ConfigError, ForgeError, UsageError
from forge_env.visible import visible

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


class Word(NamedTuple):
    """A positional word of a command."""

    name: str
    help: str
    required: bool


class Formatter(argparse.HelpFormatter):
    """Help formatter that wraps one-line descriptions, keeps multi-line ones, and appends defaults to help texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.option_strings or action.default in (None, False, argparse.SUPPRESS, [], ""):
            return action.help
        return f"{action.help} (default: %(default)s)"


def number(text: str) -> float:
    """Parse a finite number; raise `ValueError` for anything else."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


class Parser(argparse.ArgumentParser):
    """Argument parser without abbreviations that also accepts keys: `--a.b VALUE`, `--a.b=VALUE` or `a.b=VALUE`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=Formatter, allow_abbrev=False)
        self._words: list[Word] = []
        self._any_number = False
        self._model: type[BaseModel] | None = None
        self._short: Mapping[str, str] = {}
        self.takes_keys = False

    def word(self, name: str, help_text: str, *, required: bool = True, any_number: bool = False) -> None:
        """Accept a positional word, at any position among the keys."""
        self._words.append(Word(name, help_text, required))
        self._any_number |= any_number

    def keys(self, model: type[BaseModel] | None = None, short: Mapping[str, str] | None = None) -> None:
        """Accept keys.

        Args:
            model: config model whose fields `--help` documents, if it is known before the command runs.
            short: keys by their one-letter flags.
        """
        self.takes_keys, self._model, self._short = True, model, short or {}

    def read_rest(self, args: argparse.Namespace, rest: Sequence[str]) -> None:
        """Parse words and keys into `args` from the arguments that are not flags of the command."""
        from forge_env.config.reader import not_understood, read_arguments

        for argument, after in pairwise([*rest, "--"]):  # without a value, so perhaps a misspelt flag
            if argument.startswith("--") and "=" not in argument and after.startswith("--"):
                self.refuse_flag(argument, f"{argument} needs a value", required=False)
        args.words, args.overrides = read_arguments(rest, self._short)
        if missing := [word.name for word in self._words[len(args.words) :] if word.required]:
            self.error(f"{missing[0]} is missing")
        if not self._any_number and len(args.words) > len(self._words):
            raise not_understood(args.words[len(self._words)])

    def format_help(self) -> str:
        """Format the usage, the command's flags, and every key with its documentation."""
        for word in self._words:
            self.add_argument(word.name, metavar=word.name, help=_escaped(word.help))
        self._words = []
        groups: dict[str, argparse._ArgumentGroup] = {}
        for title, key, field, default in _documented(self._model) if self._model else ():
            if title not in groups:
                name, _, text = title.partition(": ")
                groups[title] = self.add_argument_group(name, _escaped(text) or None)
            letters = [f"-{letter}" for letter, name in self._short.items() if name == key]
            flag = key if "." in key else key.replace("_", "-")
            metavar, text = _described(field, default)
            groups[title].add_argument(*letters, f"--{flag}", metavar=metavar, help=_escaped(text))
        self._model = None
        return super().format_help()

    def refuse_flag(self, argument: str, message: str, *, required: bool = True) -> None:
        """Raise a `UsageError` about an unknown flag; without `required`, only if a flag was probably misspelt."""
        guess = self.meant(argument.partition("=")[0].lstrip("-"))
        if guess or required:
            raise UsageError(message, fix=f"did you mean {guess[0]}?" if guess else f"see {self.prog} --help")

    def with_flags(self, error: ConfigError) -> ConfigError:
        """Put the command's flags before the keys in other sections, in hints about unknown keys."""
        from forge_env.config.reader import InvalidConfigError

        if not isinstance(error, InvalidConfigError) or error.source is None:
            return error
        problems = []
        for problem in error.problems:
            unknown = problem.text.startswith("unknown key") and len(problem.path) == 1
            flags = self.meant(problem.path[0]) if unknown and all("." in key for key in problem.meant) else []
            problems.append(problem._replace(text="unknown key", meant=[*flags, *problem.meant]) if flags else problem)
        return error.source.refuse(problems)

    def meant(self, name: str) -> list[str]:
        """List the command's flags that an unknown name probably stands for."""
        from forge_env.config import hints

        flags = {flag[2:].replace("-", "_"): flag for flag in self._option_string_actions if flag.startswith("--")}
        guesses = [flags.get(key, key) for key in hints.meant([name.replace("-", "_")], (), flags)]
        return [guess for guess in guesses if guess in flags.values()]

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError` (exit code 2) with the message."""
        raise UsageError(message, fix=f"see {self.prog} --help")


def _escaped(text: str) -> str:
    return text.replace("%", "%%").replace("`", "")


def _documented(
    model: type[BaseModel], prefix: str = "", title: str = "", given: Any = None
) -> Iterator[tuple[str, str, FieldInfo, Any]]:
    """Yield group title, dotted key, field and default of every key, the model's own keys before inherited ones.

    Args:
        title: title of their group; if empty, the docstring of the class that defines each key.
        given: default value of the section, with the defaults of its keys.
    """
    from forge_env.config.reader import section_of

    first, *bases = (base for base in model.__mro__ if "__annotations__" in vars(base))
    for base in (first, *reversed(bases)):
        for name in vars(base)["__annotations__"]:
            field = model.model_fields.get(name)
            if field is not None and section_of(field.annotation) is None:
                yield (
                    title or (base.__doc__ or "").rstrip("."),
                    prefix + name,
                    field,
                    getattr(given, name, field.default),
                )
    for name, field in model.model_fields.items():
        if inner := section_of(field.annotation):
            text = f"{prefix}{name}: {field.description}"
            yield from _documented(inner, f"{prefix}{name}.", text, getattr(given, name, field.default))


def _described(field: FieldInfo, default: Any) -> tuple[str, str]:
    from pydantic_core import PydanticUndefined

    kinds = (field.annotation, *get_args(field.annotation))
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    looks = "|".join(choices) or ("true|false" if bool in kinds else "VALUE")
    if default is PydanticUndefined or default in ([], {}, "", None):
        return looks, field.description or ""
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    return looks, f"{field.description} (default: {shown})"


def report_error(error: BaseException, hint: str = "this is a bug; --debug shows where") -> None:
    """Print an error to stderr, with its fix on a separate line; `hint` is the fix of unexpected errors."""
    if isinstance(error, ForgeError):
        print(f"forge-env: {visible(error.message)}", file=sys.stderr)
        if error.fix:
            print(f"  -> {visible(error.fix)}", file=sys.stderr)
    elif isinstance(error, OSError):
        path = f": {error.filename}" if error.filename else ""
        print(f"forge-env: {error.strerror or error}{path}", file=sys.stderr)
    else:
        first = next(iter(str(error).strip().splitlines()), "")  # further lines of libraries' messages are only logged
        print(f"forge-env: {type(error).__name__}: {visible(first)}", file=sys.stderr)
        print(f"  -> {hint}", file=sys.stderr)


def tidy() -> None:
    """Remove temporary files and sandboxes of dead processes: before `train`, after every other command.

    It runs in the main thread, because imports in a second thread can see modules that are only partly initialized.
    """
    from forge_env.run.scratch import reap_scratch
    from forge_env.sandbox import reap_abandoned

    reap_scratch()
    reap_abandoned()


def add_environment(parser: Parser, *, required: bool = True) -> None:
    """Add arguments for an environment, its options, and its sandbox engine."""
    command = parser.prog.rpartition(" ")[2]
    name = "NAME" if required else "[NAME]"
    parser.usage = f"forge-env {command} {name} [--key VALUE | key=VALUE ...] [--sandbox ENGINE] [...]"
    parser.description = f"{parser.description} Options of the environment are given as --key VALUE or key=VALUE."
    text = "an installed environment (`forge-env info` lists them), NAME:VALUE with its option, or module:Class"
    parser.word("NAME", text, required=required)
    parser.keys()
    parser.add_argument("--sandbox", default="auto", metavar="ENGINE", help="auto, docker, local, kubernetes, e2b")
    add_docker_host(parser)


def add_docker_host(parser: argparse.ArgumentParser) -> None:
    """Add an argument for a Docker daemon on another machine."""
    help_text = "Docker daemon of another machine: tcp://HOST:PORT or ssh://HOST (default: $DOCKER_HOST)"
    parser.add_argument("--docker-host", metavar="ADDRESS", help=help_text)


def environment_options(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the name of the command line's environment and its options; dotted keys become nested options.

    Raises:
        UsageError: there is no such environment, option or sandbox engine.
    """
    from forge_env.config.reader import Source, validate, values
    from forge_env.registry import environment_class, given_in
    from forge_env.sandbox.engines import load_engine

    if args.sandbox != "auto":
        load_engine(args.sandbox)  # report an unknown engine even if no code will run
    name = args.words[0]
    cls = environment_class(name)
    source = Source("", given_in(name)[1]).with_overrides(values(args.overrides, cls.config_class))
    validate(cls.config_class, source.data, source)
    return name, source.data
