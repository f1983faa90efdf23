"""Conversion of a data set's asserts into checks: a call and a literal if an assert compares these, otherwise a file.

The row alone determines which names the agent defines: those that the reference solution defines, or those that the
tests call and nothing else defines. Everything else in an assert, such as `set(...)` or `math.isclose(...)`, is
evaluated in the tests' process, where the agent can't change it.
"""

from __future__ import annotations

import ast
import builtins
import sys
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass

from environments.coding_rlvr.checks import PLAIN, Check, Setup, bound_by, callable_source, test_source
from forge_env.concurrency import parse_python

_BUILTINS = set(dir(builtins))
_IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Suite:
    """The checks of a row, and the source that surrounds the agent's code."""

    checks: list[Check]
    setup: Setup


def suite_of(
    statements: Sequence[str],
    *,
    imports: str = "",
    setup: str = "",
    reference: str = "",
    names: Sequence[str] = (),
) -> Suite | None:
    """Convert asserts into checks, calls first. None if a test is not Python or needs the agent's process.

    `imports` is trusted source before the agent's code, `setup` source after it, which may use the agent's names.
    `reference` defines and imports what is expected of the agent, unless `names` lists that.
    """
    try:
        trees = [parse_python(source) for source in statements]
        before, after = parse_python(imports), parse_python(setup)
    except (SyntaxError, ValueError):
        return None
    before.body += [item for item in after.body if isinstance(item, _IMPORTS)]
    after.body = [item for item in after.body if not isinstance(item, _IMPORTS)]
    solution = _Solution.of(reference)
    known = list(names) or _agents_names([*trees, after], solution, _bound(before))
    before.body += _missing_imports([*trees, before, after], solution, {*_bound(before), *_bound(after), *known})
    inside = bool(_free(after) & {*known})
    trusted = ast.unparse(before if inside else ast.Module([*before.body, *after.body], []))
    scope = _Scope({*known}, solution.classes, _bound(after), _bound(before), trusted, inside)
    checks: list[Check] = []
    for tree in trees:
        if (made := _checks_of(tree, scope)) is None:
            return None
        checks += made
    around = "\n".join([ast.unparse(after), PLAIN, callable_source(sorted(scope.agents))])
    return Suite(sorted(checks, key=lambda check: "test" in check), {"before": ast.unparse(before), "after": around})


@dataclass(frozen=True)
class _Scope:
    """Origins of the names in a row's tests."""

    agents: set[str]
    """Functions and classes that the agent defines."""
    classes: set[str]
    """Classes of the reference solution."""
    made: set[str]
    """Names that the set-up binds."""
    imported: set[str]
    """Names that the row's imports bind."""
    trusted: str
    """Source at the beginning of a test file."""
    inside: bool
    """Whether the set-up uses names that the agent defines, so that it can only run in the agent's process."""


def _checks_of(tree: ast.Module, scope: _Scope) -> list[Check] | None:
    """A check for each assert if all compare a call with a literal, otherwise one test file; None if neither works.

    A test file can't use objects of the agent's classes, since these could equal anything.
    """
    statements = [item for item in tree.body if not _says_nothing(item)]
    compared = [_compared(item, scope) for item in statements]
    checks = [check for check in compared if check is not None]
    if len(checks) == len(statements):
        return checks
    used = _free(tree)
    functions = sorted(used & scope.agents)
    made_inside = used & scope.made if scope.inside else set()
    if not functions or made_inside or any(name in scope.classes or name[:1].isupper() for name in functions):
        return None
    source = ast.unparse(tree)
    test = test_source(functions, scope.trusted, source)
    reserved = sorted(used & _BUILTINS - scope.agents)
    return [{"call": source, "expected": "", "compare": "asserts", "test": test, "reserved": reserved}]


def _says_nothing(item: ast.stmt) -> bool:
    """Whether a statement has no effect: a docstring, `pass`, or `assert True`."""
    if isinstance(item, ast.Expr | ast.Assert):
        value = item.value if isinstance(item, ast.Expr) else item.test
        return isinstance(value, ast.Constant) and (isinstance(item, ast.Expr) or bool(value.value))
    return isinstance(item, ast.Pass)


def _compared(item: ast.stmt, scope: _Scope) -> Check | None:
    """The check for an assert that compares a call of the agent's code with a literal, otherwise None."""
    if not isinstance(item, ast.Assert):
        return None
    test = item.test
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    called = test.operand if isinstance(test, ast.UnaryOp) and negated else test
    if _is_agents_call(called, scope):
        call = ast.unparse(called)
        return {"call": call, "expected": str(not negated), "compare": "truth", "run": f"not not ({call})"}
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is)):
        return None
    left, right = test.left, test.comparators[0]
    if not _is_agents_call(left, scope):
        left, right = right, left
    try:
        expected = literal_eval(right)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not _is_agents_call(left, scope):
        return None
    call = ast.unparse(left)
    check = Check(call=call, expected=repr(expected), compare="equal", run=f"_forge_plain({call})")
    if isinstance(test.ops[0], ast.Is):
        check["compare"] = "same"
    return check


def _is_agents_call(node: ast.expr, scope: _Scope) -> bool:
    """Whether an expression as a whole calls the agent's code: `f(...)`, or `Class(...).method(...)`.

    `f(...).method()` doesn't count: the agent could return an object whose methods return anything.
    """
    if not isinstance(node, ast.Call) or not _free(node) <= {*scope.agents, *scope.made, *scope.imported, *_BUILTINS}:
        return False
    function = node.func
    if isinstance(function, ast.Name):
        return function.id in scope.agents
    while isinstance(function, ast.Attribute | ast.Call):
        function = function.value if isinstance(function, ast.Attribute) else function.func
    return isinstance(function, ast.Name) and function.id in scope.agents & scope.classes


@dataclass(frozen=True)
class _Solution:
    """Definitions and imports of a reference solution; empty if it is not Python."""

    defined: set[str]
    classes: set[str]
    imports: list[ast.Import | ast.ImportFrom]

    @classmethod
    def of(cls, source: str) -> _Solution:
        """Parse the source of a module."""
        try:
            body = parse_python(source).body
        except (SyntaxError, ValueError):
            body = []
        return cls(
            {name for item in body if not isinstance(item, _IMPORTS) for name in bound_by(item)},
            {item.name for item in body if isinstance(item, ast.ClassDef)},
            [item for item in body if isinstance(item, _IMPORTS) and getattr(item, "module", "") != "__future__"],
        )


def _agents_names(trees: Sequence[ast.Module], solution: _Solution, imported: set[str]) -> list[str]:
    """Names that tests use and the reference solution defines, or that tests call and nothing else defines."""
    others = {*imported, *_BUILTINS, *(name for item in solution.imports for name in bound_by(item))}
    names: set[str] = set()
    for tree in trees:
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = {function.id for function in calls if isinstance(function, ast.Name)}
        names |= _free(tree) & (solution.defined | (called - others))
    return sorted(names - {name for tree in trees for name in _bound(tree)} - imported)


def _missing_imports(trees: Sequence[ast.Module], solution: _Solution, defined: set[str]) -> list[ast.stmt]:
    """Imports, of the reference solution or the standard library, for names that tests use and nothing defines."""
    missing = {name for tree in trees for name in _free(tree)} - defined - _BUILTINS
    items: list[ast.stmt] = []
    for item in solution.imports:
        names = [alias for alias in item.names if (alias.asname or alias.name.partition(".")[0]) in missing]
        if names:
            items.append(ast.Import(names) if isinstance(item, ast.Import) else ast.ImportFrom(item.module, names, 0))
            missing -= set(bound_by(items[-1]))
    return [*items, *(ast.Import([ast.alias(name)]) for name in sorted(missing & sys.stdlib_module_names))]


def _bound(tree: ast.Module) -> set[str]:
    """Names that the statements of a module bind."""
    return {name for item in tree.body for name in bound_by(item)}


def _free(tree: ast.AST) -> set[str]:
    """Names that a tree uses and does not bind."""
    used: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound
