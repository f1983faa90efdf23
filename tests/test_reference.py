"""What is public has a docstring with its arguments and an example, and the examples run."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env import registry
from forge_env.cli.main import COMMANDS
from tests.test_rooms import tree

ROOT = Path(__file__).parents[1]
PAGES = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
OWN = {name: getattr(fe, name) for name in fe.__all__ if not inspect.ismodule(getattr(fe, name))}
PUBLIC = {f"fe.{name}": found for name, found in OWN.items() if callable(found)} | {
    f"fe.{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name)
    for module in (fe.rewards, fe.tools)
    for name in module.__all__
}
SHOWN = re.findall(r"^::: ([\w.]+)\.(\w+)$", PAGES, re.MULTILINE)
"""Module and name of everything that has a place in the reference."""


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_has_a_place_in_the_reference(name: str) -> None:
    found = PUBLIC[name]
    assert (found.__module__, found.__name__) in SHOWN
    assert f"`{name.split('.')[1]}`" in (ROOT / "docs" / "reference" / "README.md").read_text()


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_says_what_its_arguments_are(name: str) -> None:
    found = PUBLIC[name]
    assert arguments(found) <= described(found)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_has_an_example_that_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_LISTENERS", [])
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert "\nExamples:\n" in text
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:  # a short path: sockets have no room for long ones
        monkeypatch.setattr(tempfile, "tempdir", folder)
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert len(example.examples) > 1
    assert not said, "".join(said)


@pytest.mark.parametrize(("module", "name"), SHOWN)
def test_what_is_shown_is_described(module: str, name: str) -> None:
    node = definition(module, name)
    assert ast.get_docstring(node)
    if isinstance(node, ast.ClassDef):
        known = with_text(node) | documented(ast.get_docstring(node) or "")
        if module.startswith("forge_env"):
            known |= described(getattr(import_module(module), name))
        assert {field for field in annotated(node) if not field.startswith("_")} <= known
        for method in node.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_"):
                assert ast.get_docstring(method), method.name


@pytest.mark.parametrize(("module", "name"), [place for place in SHOWN if place[0].startswith("forge_env")])
def test_methods_that_are_shown_say_what_their_arguments_are(module: str, name: str) -> None:
    found = getattr(import_module(module), name)
    for method, function in vars(found).items() if isinstance(found, type) else ():
        function = getattr(function, "__func__", function)  # of a class method
        if method.startswith("_") or not inspect.isfunction(function):
            continue
        bases = [getattr(cls, method) for cls in found.__mro__ if method in vars(cls)]
        known = {word for base in bases for word in documented(inspect.getdoc(base) or "")}
        assert arguments(function) <= known, method


@pytest.mark.parametrize("name", ["Task", "Message", "SandboxSpec", "Sandbox", "Limits", "Rubric", "Trajectory"])
def test_what_authors_look_up_most_has_a_page_with_its_name(name: str) -> None:
    (page,) = (
        page for page in (ROOT / "docs" / "reference").glob("*.md") if page.read_text().startswith(f"# {name}\n")
    )
    assert re.search(rf"^::: [\w.]+\.{name}$", page.read_text(), re.MULTILINE)


def test_every_command_has_a_place_in_the_reference() -> None:
    assert set(re.findall(r"^<!-- output: forge-env (\w+) --help -->$", PAGES, re.MULTILINE)) == set(COMMANDS)


def arguments(found: Any) -> set[str]:
    """Names of what is given to a function or a constructor."""
    signature = inspect.signature(found)
    return {name for name in signature.parameters if name not in ("self", "cls")}


def described(found: Any) -> set[str]:
    """Names that a docstring tells of, or the text below a field, also of the bases."""
    known = documented(inspect.getdoc(found) or "")
    for cls in getattr(found, "__mro__", ()):
        if cls.__module__.startswith("forge_env"):
            known |= with_text(definition(cls.__module__, cls.__name__))
    return known


def documented(text: str) -> set[str]:
    """Names in the part `Args` or `Attributes` of a docstring."""
    parts = re.findall(r"^(?:Args|Attributes):\n((?:(?: {4}.*)?\n?)*)", text, re.MULTILINE)
    return {name for part in parts for name in re.findall(r"^ {4}(\w+): ", part, re.MULTILINE)}


def definition(module: str, name: str) -> Any:
    """Where a class or function is written."""
    file = ROOT.joinpath(*module.split("."))
    path = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    return [node for node in tree(path).body if getattr(node, "name", None) == name][-1]


def annotated(node: ast.ClassDef) -> Iterator[str]:
    """Names of a class's fields."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id


def with_text(node: ast.ClassDef) -> set[str]:
    """Those with a text below them."""
    return {
        item.target.id
        for item, after in zip(node.body, node.body[1:], strict=False)
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
