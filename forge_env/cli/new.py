"""`forge-env new`: write an installable package with a small working environment, as a template."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from importlib.resources import files
from importlib.util import find_spec
from string import Template

from forge_env.cli.command import Parser
from forge_env.errors import UsageError
from forge_env.machine import has_pip, user_path
from forge_env.plugins import SIBLINGS
from forge_env.registry import names

TAKEN = (
    "datasets docker examples forge forge_env gym gymnasium httpx httpx2 jax mcp monarch numpy openai openenv pandas"
    " pip pyarrow pydantic pytest ray requests rich scipy setuptools src starlette tensorflow test tests tokenizers"
    " torch torchstore torchtitan torchvision transformers trl triton uvicorn verifiers vllm wandb yaml"
)
"""Names of packages that may be installed beside an environment on some machine, and so can't be used."""

TESTS = {"sandbox": "test_sandbox.py.txt", "repository": "test_repository.py.txt", "program": "test_program.py.txt"}
"""Test templates of the kinds whose agents need a sandbox."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="name of the environment and its package")
    kinds = ("tools", "single", "sandbox", "repository", "program")
    about = "template: tools, a single turn, a sandbox, a software repository, or a program with its own loop"
    parser.add_argument("--kind", choices=kinds, default="tools", help=about)
    parser.add_argument(
        "--openenv",
        action="store_true",
        help="add openenv.yaml with its application, image and validation episode",
    )
    parser.add_argument(
        "--verifiers",
        action="store_true",
        help="add the package NAME_vf, a taskset of verifiers, which prime-rl trains on",
    )
    parser.add_argument("--dir", default=".", metavar="DIR", help="parent of the new folder")


def run(args: argparse.Namespace) -> int:
    """Write the package and print the next steps."""
    name = args.name
    check_name(name)
    folder = user_path(args.dir) / user_path(name)
    if folder.exists():
        raise UsageError(f"{folder} already exists", fix="choose another name, or --dir")
    for path, text in render(name, args.kind, openenv=args.openenv, verifiers=args.verifiers).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    print(f"wrote {folder}: edit {folder / 'src' / name / 'environment.py'}, then")
    pip = "pip" if has_pip() else "uv pip"  # virtual environments made by uv have no pip
    print(f"  {pip} install -e {folder}")
    print(f"  forge-env validate {name}")
    print(f"  forge-env play {name}")
    return 0


def check_name(name: str) -> None:
    """Raise `UsageError` unless `name` is a valid and unused package name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        suggestion = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789") or "my_env"
        suggestion += "_env" if keyword.iskeyword(suggestion) else ""
        raise UsageError(f"{name!r} can't name a package", fix=f"lowercase letters, digits and _: {suggestion}")
    spec = find_spec(name)
    installed = spec is not None and spec.origin is not None  # a folder without `__init__.py` is not a package
    if installed or name in (*SIBLINGS, *TAKEN.split(), *sys.stdlib_module_names):
        raise UsageError(f"{name!r} would hide a package of that name", fix="choose another name")
    if name in names():
        raise UsageError(f"an environment {name!r} is already installed", fix="choose another name")


def render(name: str, kind: str, *, openenv: bool = False, verifiers: bool = False) -> dict[str, str]:
    """Render the package's files: text by path."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    values = {"name": name, "class_name": class_name, "distribution": name.replace("_", "-")}
    templates = files("forge_env.cli") / "templates"

    def fill(template: str) -> str:
        return Template((templates / template).read_text(encoding="utf-8")).substitute(values)

    served = {
        "openenv.yaml": fill("openenv.yaml.txt"),
        "Dockerfile": fill("Dockerfile.txt"),
        "validation/runtime.json": fill("runtime.json.txt"),
        f"src/{name}/server.py": fill("server.py.txt"),
    }
    return {
        "pyproject.toml": fill("pyproject.toml.txt"),
        "README.md": fill("README.md.txt"),
        # Under src/: otherwise the folder NAME would shadow the package in programs started from its parent.
        f"src/{name}/__init__.py": fill("init.py.txt"),
        f"src/{name}/environment.py": fill(f"{kind}.py.txt"),
        f"tests/test_{name}.py": fill(TESTS.get(kind, "test.py.txt")),
        **({f"src/{name}/agent.py": fill("agent.py.txt")} if kind == "program" else {}),
        **(served if openenv else {}),
        **({f"src/{name}_vf/__init__.py": fill("taskset.py.txt")} if verifiers else {}),
    }
