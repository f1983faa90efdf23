"""Small wrong versions ("mutants") of Python code, by kind.

The kinds are the usual ones of mutation testing (Y. Jia and M. Harman, "An Analysis and Survey of the Development of
Mutation Testing", 2011). A mutant that compiles to the same byte code as the original, or as an earlier mutant, is
left out ("trivial compiler equivalence": M. Papadakis et al., 2015).
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from operator import attrgetter
from types import CodeType
from typing import TypeVar

from forge_env.concurrency import parse_python

T = TypeVar("T")
BOUNDARY: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE,), ast.LtE: (ast.Lt,), ast.Gt: (ast.GtE,), ast.GtE: (ast.Gt,),
}  # fmt: skip
COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.Gt), ast.LtE: (ast.Gt, ast.GtE), ast.Gt: (ast.LtE, ast.Lt), ast.GtE: (ast.Lt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_PAIRS = (
    *(("min", "max"), ("any", "all"), ("upper", "lower"), ("startswith", "endswith"), ("lstrip", "rstrip")),
    *(("find", "rfind"), ("append", "extend"), ("floor", "ceil"), ("union", "intersection"), ("split", "rsplit")),
)
CALLED = {"sorted": "list", "reversed": "list", "sum": "len"} | {a: b for x, y in _PAIRS for a, b in ((x, y), (y, x))}
"""Functions and methods, and those that they are mistaken for."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong version of a text."""

    kind: str
    """"boundary", "operator", "constant", "off by one", "branch", "dropped line", "wrong default", "call", ..."""
    line: int
    """Line of the change, from 1."""
    change: str
    """What was changed: `x > 6 -> x >= 6`."""
    text: str
    """The whole changed text."""


@dataclass(frozen=True, slots=True)
class _Site:
    kind: str
    node: ast.expr | ast.stmt
    made: ast.expr | ast.stmt


def python_mutants(source: str, *, most: int, seed: str = "", first: Collection[int] = ()) -> list[Mutant]:
    """Draw mutants of a module, evenly by kind; none if it isn't valid Python.

    Args:
        first: lines whose functions are changed before other code, such as those of a repair.
    """
    try:
        tree, original = parse_python(source), _compiled(source)
        return list(islice(_drawn(source, tree, original, seed, first), most))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # also code that is too deep, or only can be parsed
        return []


def _drawn(source: str, tree: ast.Module, original: object, seed: str, first: Collection[int]) -> Iterator[Mutant]:
    """All mutants whose byte code differs from the original's and from each other's."""
    sites = list(_sites(tree))
    near = _functions_at(tree, first)
    chosen, others = list[_Site](), list[_Site]()
    for site in sites:
        (chosen if any(start <= site.node.lineno <= end for start, end in near) else others).append(site)
    seen = {original}
    for site in [*evenly(chosen, seed), *evenly(others, seed)]:
        text = _replaced(source, tree, site)
        if text is None:
            continue
        try:
            key = _compiled(text)
        except (SyntaxError, ValueError):
            continue
        if key not in seen:
            seen.add(key)
            was, made = _short(ast.unparse(site.node)), _short(ast.unparse(site.made))
            yield Mutant(site.kind, site.node.lineno, f"{was} -> {made}", text)


def evenly(items: Sequence[T], seed: str, kind: Callable[[T], str] = attrgetter("kind")) -> list[T]:
    """Shuffle items so that each kind comes equally early."""
    kinds: dict[str, list[T]] = {}
    for item in random.Random(seed).sample(items, len(items)):
        kinds.setdefault(kind(item), []).append(item)
    return [item for row in zip_longest(*kinds.values()) for item in row if item is not None]


def _functions_at(tree: ast.Module, lines: Collection[int]) -> list[tuple[int, int]]:
    """First and last lines of the innermost functions that contain one of `lines`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    spans = [(node.lineno, node.end_lineno or node.lineno) for node in ast.walk(tree) if isinstance(node, kinds)]
    around = [[span for span in spans if span[0] <= line <= span[1]] for line in lines]
    return list({min(spans_at, key=lambda span: span[1] - span[0]) for spans_at in around if spans_at})


def _short(text: str) -> str:
    text = text.partition("\n")[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


def _compiled(source: str) -> object:
    """The byte code of a module without line numbers and docstrings."""
    return _comparable(compile(parse_python(source), "<mutant>", "exec", optimize=2, dont_inherit=True))


def _comparable(code: CodeType) -> object:
    consts = [_comparable(item) if isinstance(item, CodeType) else (type(item), repr(item)) for item in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_exceptiontable)
    return code.co_code, tuple(consts), names, code.co_argcount, code.co_kwonlyargcount, code.co_flags


def _replaced(source: str, tree: ast.Module, site: _Site) -> str | None:
    """The source with the site's node replaced, if that text means it: in parentheses if it must."""
    lines = source.encode().splitlines(keepends=True)
    node = site.node
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    data = source.encode()
    wanted = ast.dump(_Swap(site).visit(copy.deepcopy(tree)))
    made = ast.unparse(site.made).replace("\n", f"\n{' ' * node.col_offset}")
    for text in (made, f"({made})"):
        changed = (data[:start] + text.encode() + data[end:]).decode()
        try:
            if ast.dump(parse_python(changed)) == wanted:
                return changed
        except (SyntaxError, ValueError):
            continue
    return None


class _Swap(ast.NodeTransformer):
    """Replaces the node of a site in a copy of its tree."""

    def __init__(self, site: _Site) -> None:
        self.site = site

    def visit(self, node: ast.AST) -> ast.AST:
        same = isinstance(node, type(self.site.node)) and _where(node) == _where(self.site.node)
        return self.site.made if same else self.generic_visit(node)


def _where(node: ast.AST) -> tuple[object, ...]:
    return tuple(getattr(node, name, None) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"))


# --- the places of a module that can be changed


def _sites(tree: ast.Module) -> Iterator[_Site]:
    defaults = {
        id(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.arguments)
        for value in (*node.defaults, *node.kw_defaults)
    }
    for node in _changeable(tree):
        if isinstance(node, ast.stmt):
            yield from _statement(node)
        elif isinstance(node, ast.expr):
            for kind, made in _expression(node):
                yield _Site("wrong default" if id(node) in defaults else kind, node, made)


def _changeable(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, without docstrings, imports, annotations, decorators, formats and messages of errors."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom) or _is_text(child) or _is_main(child):
                continue
            if isinstance(child, ast.AST):
                yield child
                if not isinstance(child, ast.Raise):
                    yield from _changeable(child)


def _is_text(node: object) -> bool:
    """Whether it is a docstring, or another text that does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_main(node: object) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'"


def _statement(node: ast.stmt) -> Iterator[_Site]:
    if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare):
        yield _Site("branch", node.test, ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.While) and not node.orelse and not _leaves(node):
        yield _Site("branch", node, ast.If(node.test, node.body, []))
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield _Site("wrong result", node.value, ast.Constant(None))
    stored = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    guard = isinstance(node, ast.If) and not node.orelse
    if stored or called or guard or isinstance(node, ast.AugAssign | ast.Raise | ast.Delete):
        yield _Site("dropped line", node, ast.Pass())


def _leaves(node: ast.While) -> bool:
    """Whether a loop contains `break` or `continue`, which no other statement may."""
    return any(isinstance(part, ast.Break | ast.Continue) for part in ast.walk(node))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(left, ops, comparators):
            for index, op in enumerate(ops):
                for kind, table in (("boundary", BOUNDARY), ("operator", COMPARED)):
                    for other in table.get(type(op), ()):
                        yield kind, ast.Compare(left, [*ops[:index], other(), *ops[index + 1 :]], comparators)
        case ast.BinOp(left, op, right) if not _is_pattern(left):
            if type(op) in COMPUTED:
                yield "operator", ast.BinOp(left, COMPUTED[type(op)](), right)
            if not isinstance(op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr | ast.BitXor):
                yield "swapped operands", ast.BinOp(right, op, left)
            yield from (("dropped operand", other) for other in (left, right))
        case ast.BoolOp(op, values):
            yield "operator", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            rests = [[*values[:index], *values[index + 1 :]] for index in range(len(values))]
            yield from (("dropped operand", ast.BoolOp(op, rest) if rest[1:] else rest[0]) for rest in rests)
        case ast.UnaryOp(op, operand) if isinstance(op, ast.Not | ast.USub):
            yield "operator", operand
        case ast.IfExp(test, body, orelse) if not isinstance(test, ast.Compare):
            yield "branch", ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Call(ast.Name(name), args, keywords) if name in CALLED:
            if CALLED[name] not in ("list", "len") or (len(args) == 1 and not keywords):
                yield "call", ast.Call(ast.Name(CALLED[name], ast.Load()), args, keywords)
        case ast.Call(ast.Attribute(value, name), args, keywords) if name in CALLED:
            if name in ("split", "rsplit") and len(args) + len(keywords) < 2:
                return  # without a limit they do the same
            yield "call", ast.Call(ast.Attribute(value, CALLED[name], ast.Load()), args, keywords)
        case ast.ListComp(_, generators) | ast.SetComp(_, generators) | ast.GeneratorExp(_, generators):
            yield from _filters(node, generators)
        case ast.DictComp(_, _, generators):
            yield from _filters(node, generators)
        case ast.Constant(value):
            yield from ((kind, ast.Constant(other)) for kind, other in _constants(value))


def _is_pattern(node: ast.expr) -> bool:
    """Whether it is a text, whose `%` formats and whose `*` repeats."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _filters(node: ast.expr, generators: Sequence[ast.comprehension]) -> Iterator[tuple[str, ast.expr]]:
    """The comprehension without each of its conditions."""
    for index, generator in enumerate(generators):
        if generator.ifs:
            made = copy.deepcopy(node)
            made.generators[index].ifs = []  # type: ignore[attr-defined]
            yield "branch", made


def _constants(value: object) -> Iterator[tuple[str, bool | int | float | str]]:
    match value:
        case bool():
            yield "constant", not value
        case int():
            yield "off by one", value + 1
            if value > 0:
                yield "off by one", value - 1
        case float():
            yield "constant", value + 1.0
        case str():
            yield "constant", f"{value}x" if value else "x"
            if value:
                yield "constant", ""
