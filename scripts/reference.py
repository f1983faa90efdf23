"""Write docs/reference/: a page for each class that authors of environments meet, from its docstrings.

python scripts/reference.py            writes them
python scripts/reference.py --check    exits with 1 where one would change, or something public has no description
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from docstring_parser import parse

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
PAGES = {
    "environment": ("forge_env/environment/base.py", ["EnvironmentConfig", "Environment"]),
    "task": ("forge_env/types.py", ["Task"]),
    "message": ("forge_env/types.py", ["Message", "ToolCall", "FunctionCall", "ToolSpec"]),
    "limits": ("forge_env/sandbox/protocol.py", ["Limits"]),
    "sandbox_spec": ("forge_env/sandbox/protocol.py", ["SandboxSpec"]),
    "sandbox": (
        "forge_env/sandbox/protocol.py",
        ["Sandbox", "ExecResult", "CallsResult", "CallOutcome", "TestsResult", "OutputChunk", "Session", "Process"],
    ),
    "rubric": ("forge_env/rewards/rubric.py", ["Rubric", "RubricResult"]),
    "trajectory": ("forge_env/trajectory.py", ["Trajectory", "Turn", "Segment"]),
    "reply": ("forge_env/policy.py", ["Reply"]),
}
"""Page -> file and its classes."""


class Undescribed(Exception):
    """Something public has no docstring."""


def page(file: str, names: list[str]) -> str:
    """One page."""
    found = {node.name: node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.ClassDef)}
    lines = [f"<!-- made by scripts/reference.py of {file} -->"]
    for level, name in enumerate(names):
        lines += ["", f"{'#' if level == 0 else '##'} {name}", "", *class_lines(found[name])]
    return "\n".join(lines) + "\n"


def class_lines(node: ast.ClassDef) -> Iterator[str]:
    """A class: what it is, its fields as a table, its methods."""
    text = parse(described(node, node.name))
    yield " ".join(text.short_description.split()) if text.short_description else ""
    if text.long_description:
        yield ""
        yield text.long_description
    said = {param.arg_name: " ".join((param.description or "").split()) for param in text.params}
    rows = list(fields(node, said))
    if rows:
        yield from ("", "| field | type | default | |", "|---|---|---|---|")
        yield from rows
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(method):
            yield from method_lines(method, node.name)


def fields(node: ast.ClassDef, said: dict[str, str]) -> Iterator[str]:
    """A row for each annotated name, in order; its description stands below it, or among the class's attributes."""
    body = node.body
    for place, item in enumerate(body):
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        name = item.target.id
        if name.startswith("_"):
            continue
        after = body[place + 1] if place + 1 < len(body) else None
        text = said.get(name, "")
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = " ".join(cleandoc(after.value.value).split())
        if not text:
            raise Undescribed(f"{node.name}.{name}")
        kind = re.sub(r"^ClassVar\[(.*)\]$", r"\1", ast.unparse(item.annotation))
        yield f"| `{name}` | `{cell(kind)}` | {default(item.value)} | {cell(text)} |"


def default(value: ast.expr | None) -> str:
    """What a field is when nothing is said; a bound of a pydantic field is left to its description."""
    if value is None:
        return "required"
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "Field"):
        made = next((ast.unparse(word.value) for word in value.keywords if word.arg == "default_factory"), None)
        if made is not None:
            empty = {"list": "[]", "dict": "{}"}
            return f"`{empty.get(made, f'{made}()')}`"
        if not value.args:
            return "required"
        value = value.args[0]
    return f"`{cell(ast.unparse(value))}`"


def method_lines(method: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> Iterator[str]:
    """A method: its signature, what it does, its arguments and errors."""
    text = parse(described(method, f"{owner}.{method.name}"))
    decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
    result = "" if method.returns is None else ast.unparse(method.returns)
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(method.args))
    if method.name == "__init__":
        name, signature = owner, f"{owner}({arguments})"
    elif decorators & {"property", "cached_property"}:
        name, signature = method.name, f"{method.name}: {result}"
    else:
        waits = "await " if isinstance(method, ast.AsyncFunctionDef) and "asynccontextmanager" not in decorators else ""
        name, signature = method.name, f"{waits}{method.name}({arguments}) -> {result}"
    yield from ("", f"### {name}", "", "```python", signature, "```", "")
    yield text.short_description or ""
    if text.long_description:
        yield from ("", text.long_description)
    if text.params:
        yield ""
    for param in text.params:
        yield f"- `{param.arg_name}`: {' '.join((param.description or '').split())}"
    if text.returns is not None:
        yield from ("", f"Returns: {' '.join((text.returns.description or '').split())}")
    if text.raises:
        yield from ("", "Raises:", "")
    for error in text.raises:
        yield f"- `{error.type_name}`: {' '.join((error.description or '').split())}"


def is_public(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is for callers: the constructor where it says something of its own."""
    if method.name == "__init__":
        return ast.get_docstring(method) is not None
    return not method.name.startswith("_")


def described(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """Its docstring."""
    text = ast.get_docstring(node)
    if not text:
        raise Undescribed(name)
    return text


def cell(text: str) -> str:
    """As part of a table."""
    return text.replace("|", "\\|")


def main() -> int:
    """Write the pages, or compare them."""
    check = "--check" in sys.argv
    FOLDER.mkdir(exist_ok=True)
    changed = []
    for name, (file, classes) in PAGES.items():
        path, text = FOLDER / f"{name}.md", page(file, classes)
        if not path.exists() or path.read_text() != text:
            changed.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if check and changed:
        print(f"not up to date: {', '.join(changed)}; run python scripts/reference.py")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
