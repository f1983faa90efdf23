"""Asserts of a data set as checks: a call and a literal where an assert compares the two, or else a test file.

Which names are the agent's is decided by the row alone: those that its reference solution defines, or those that its
tests call and nothing else defines. Everything else in an assert, such as `set(...)` or `math.isclose(...)`, is
evaluated in the tests' process, out of the agent's reach.
"""

from __future__ import annotations

import ast
import builtins
import sys
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass

from environments.coding_rlvr.checks import METHOD, PLAIN, Check, Setup, bound_by, callable_source, test_source
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
    """Asserts as checks; calls come before asserts. None: some test is not Python, or can't be judged outside.

    Args:
        statements: source of tests; each is independent of the others.
        imports: trusted source that comes before the agent's code.
        setup: source that comes after it and before the tests. It may use what the agent defines.
        reference: the reference solution, which says what the agent defines and what it imports.
        names: what the agent defines, where that is known.
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


def method_setup(imports: str) -> Setup:
    """What surrounds code that is a class `Solution`, or a function."""
    return {"before": imports, "after": PLAIN + METHOD}


@dataclass(frozen=True)
class _Scope:
    """What the names in a row's tests mean."""

    agents: set[str]
    """Functions and classes that the agent defines."""
    classes: set[str]
    """Classes of the reference solution."""
    made: set[str]
    """Names that the set-up binds."""
    imported: set[str]
    """Names that the row's imports bind."""
    trusted: str
    """Source that comes first in a test file."""
    inside: bool
    """Whether the set-up uses what the agent defines, so that it runs beside the agent's code alone."""


def _checks_of(tree: ast.Module, scope: _Scope) -> list[Check] | None:
    """A check for each assert of a test if all can be compared here, else one test file; None: neither is possible.

    A test file can't use objects of the agent's: they would answer comparisons as they like.
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
    """A docstring, `pass`, or `assert True`."""
    if isinstance(item, ast.Expr | ast.Assert):
        value = item.value if isinstance(item, ast.Expr) else item.test
        return isinstance(value, ast.Constant) and (isinstance(item, ast.Expr) or bool(value.value))
    return isinstance(item, ast.Pass)


def _compared(item: ast.stmt, scope: _Scope) -> Check | None:
    """An assert that compares a call of the agent's with a literal, as a check."""
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
    """Whether all of an expression is a call of the agent's: `f(...)`, or `Class(...).method(...)`.

    `f(...).method()` is not: what a returned object says of itself decides nothing.
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
    """What a reference solution defines and imports; nothing where it is no Python."""

    defined: set[str]
    classes: set[str]
    imports: list[ast.Import | ast.ImportFrom]

    @classmethod
    def of(cls, source: str) -> _Solution:
        """The names of a module's text."""
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
    """What tests use and the reference solution defines, and what they call and nothing else defines."""
    others = {*imported, *_BUILTINS, *(name for item in solution.imports for name in bound_by(item))}
    names: set[str] = set()
    for tree in trees:
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = {function.id for function in calls if isinstance(function, ast.Name)}
        names |= _free(tree) & (solution.defined | (called - others))
    return sorted(names - {name for tree in trees for name in _bound(tree)} - imported)


def _missing_imports(trees: Sequence[ast.Module], solution: _Solution, defined: set[str]) -> list[ast.stmt]:
    """Imports of names that tests use and nothing defines: the reference solution's, or the standard library's."""
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
    """Names that are used and bound nowhere in it."""
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
