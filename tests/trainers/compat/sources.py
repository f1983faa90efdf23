"""Source of installed packages, read without importing them, since that takes seconds."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def source(path: str) -> str:
    """Normalized source of `module:name`, in which `name` is a function or class and may be dotted."""
    module, _, names = path.partition(":")
    top, *rest = module.split(".")
    spec = find_spec(top)
    assert spec.origin is not None
    file = Path(spec.origin).parent.joinpath(*rest)
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    node: ast.AST = ast.parse(file.read_text())
    for name in filter(None, names.split(".")):
        node = next(
            item for item in ast.walk(node) if isinstance(item, (*FUNCTIONS, ast.ClassDef)) and item.name == name
        )
    return ast.unparse(node)


def parameters(path: str) -> list[str]:
    """Names of the parameters of the function `module:name`."""
    (function,) = ast.parse(source(path)).body
    assert isinstance(function, FUNCTIONS)
    return [argument.arg for argument in function.args.args]
