"""Inputs on which a mutant and the gold solution differ, found by running both in a sandbox.

A probe is an expression of a task's tests or examples with other literals, as in test amplification (B. Danglot et al.,
"A Snowballing Literature Study on Test Amplification", 2019): `f([1, 6]) == 6` gives `f([1, 7])`, `f([])` and others.
Inputs on which the gold solution raises an exception are left out, unless its code or the original test names it.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forge_env.concurrency import parse_python
from forge_env.sandbox import CallOutcome, CallsResult, Judging, Limits, SandboxEngine, SandboxSpec
from forge_env.types import Task
from forge_env.validation.cheats import parsed

MOST = 400
"""Maximum probes of a task."""
DRAWS = 3 * MOST
"""Maximum variations drawn, some of which are the same."""
LONGEST = 16
"""Characters of a text from which on it is taken for a message or a docstring."""
ENOUGH = 50
"""Minimum probes with a value on which a mutant must agree with the gold solution to be called equivalent."""
_SELF = "self = _forge_self()"
LIMITS = Limits(wall_s=10.0, cpu_s=5.0)
_CANON = '''
def _forge_canon(value, depth=0):
    """Text of a value that doesn't depend on hashes and addresses."""
    if depth > 40:
        return "..."
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{', '.join(_forge_canon(item, depth + 1) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}[{', '.join(sorted(_forge_canon(item, depth + 1) for item in value))}]"
    if isinstance(value, dict):
        return f"dict[{', '.join(_forge_canon(item, depth + 1) for item in value.items())}]"
    if hasattr(value, "__next__"):
        return f"iterator{_forge_canon([item for _, item in zip(range(1000), value)], depth + 1)}"
    if isinstance(value, type) or callable(value):
        return type(value).__name__
    if type(value).__repr__ is object.__repr__:
        return f"{type(value).__name__}{_forge_canon(vars(value) if hasattr(value, '__dict__') else {}, depth + 1)}"
    return repr(value)
class _forge_self:
    """A test case that asserts nothing."""
    def __getattr__(self, name):
        if name.startswith("assert"): return lambda *args, **kwargs: None
        raise AttributeError(name)
class _ForgeSetup(Exception):
    """The statements before a probe failed."""
def _forge_probe(setup, value):
    names = dict(globals())
    try:
        exec(setup, names)
    except Exception as error:
        raise _ForgeSetup() from error
    value = eval(value, names)
    return [_forge_canon(value), repr(value)[:300]]
'''


@dataclass(frozen=True, slots=True)
class Probe:
    """An expression with the statements that come before it."""

    setup: str
    value: str
    raises: bool = False
    """Whether the test that it was made of expects an exception."""

    @property
    def oddness(self) -> int:
        """Length of the text, with a penalty for empty texts and lists."""
        text = self.setup + self.value
        return len(text) + 20 * sum(text.count(empty) for empty in ("''", "[]", "{}"))

    @property
    def call(self) -> str:
        """The call that evaluates it in the sandbox."""
        return f"_forge_probe({self.setup!r}, {self.value!r})"

    def as_test(self, value: str | None, error: str = "") -> str:
        """A test that expects `value`, or the exception `error`."""
        lines = [line for line in self.setup.splitlines() if line != _SELF]
        if value is None:
            return "\n".join([*lines, f"with pytest.raises({error}):", f"    {self.value}"])
        equals = "is" if value in ("None", "True", "False") else "=="
        return "\n".join([*lines, f"assert {self.value} {equals} {value}"])


@dataclass(frozen=True, slots=True)
class Program:
    """Python code as the probes run it: a module, or files of a package."""

    code: str
    files: Mapping[str, str | bytes]


# --- probes of tests and examples


def probes(task: Task, names: Sequence[str], source: str, seed: str) -> list[Probe]:
    """Probes made of everything in a task that calls the solution.

    Args:
        task: its prompt and data are searched for tests, asserts and examples of calls.
        source: its code, whose constants are used as values.
    """
    originals: dict[Probe, None] = {}
    for text in [task.prompt, *_texts(task.data)]:
        originals |= dict.fromkeys(_probes_in(text, set(names)))
    rng, pool = random.Random(seed), _constants(source, [probe.setup + "\n" + probe.value for probe in originals])
    made: dict[Probe, None] = dict(originals)
    varied = [_Varied(probe, pool, rng) for probe in originals]
    for _ in range(DRAWS // max(1, len(varied))):
        made |= dict.fromkeys(variations.draw() for variations in varied)
        if len(made) >= MOST:
            break
    return list(made)


def raised_in(source: str) -> set[str]:
    """Names of the exceptions that a module raises by name."""
    tree = parsed(source)
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)] if tree is not None else []
    named = [error.func if isinstance(error, ast.Call) else error for error in raised if error is not None]
    return {ast.unparse(name).rpartition(".")[2] for name in named}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for item in value.values() for text in _texts(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _texts(item))


def _probes_in(text: str, names: set[str]) -> Iterator[Probe]:
    tree = parsed(text)
    if tree is not None and any(map(_tests, tree.body)):
        before = [
            item for item in tree.body if not (_tests(item) or _is_main(item) or ast.unparse(item) == "import unittest")
        ]
        prelude = "\n".join(map(ast.unparse, before))
        for item in tree.body:
            yield from _of_tests(item, prelude)
        return
    for line in text.splitlines():
        line = line.strip().removeprefix(">>>").strip().strip("`")
        if any(name in line for name in names) and (expression := _expression(line)) is not None:
            if isinstance(expression, ast.Compare) and isinstance(expression.ops[0], ast.Eq):
                expression = expression.left
            if _root(expression) in names:
                yield Probe("", ast.unparse(expression))


def _expression(text: str) -> ast.expr | None:
    try:
        return parse_python(text.removeprefix("assert "), "eval").body
    except (SyntaxError, ValueError):
        return None


def _root(node: ast.expr) -> str:
    """Name of the function that an expression calls, or on whose result it calls methods."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _tests(item: ast.stmt) -> bool:
    """Whether a statement of a module is a test, or contains some."""
    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
        return item.name.startswith("test") or item.name == "check"
    methods = item.body if isinstance(item, ast.ClassDef) else []
    return isinstance(item, ast.Assert) or any(
        isinstance(part, ast.FunctionDef) and part.name.startswith("test") for part in methods
    )


def _is_main(item: ast.stmt) -> bool:
    return isinstance(item, ast.If) and "__name__" in ast.unparse(item.test)


def _of_tests(item: ast.stmt, prelude: str) -> Iterator[Probe]:
    if isinstance(item, ast.Assert):
        yield from _asserted([item], prelude)
    elif isinstance(item, ast.ClassDef):
        ready = [part for part in item.body if isinstance(part, ast.FunctionDef) and part.name == "setUp"]
        others = [part for part in item.body if isinstance(part, ast.Assign)]
        lines = [prelude, _SELF, *(f"self.{ast.unparse(part)}" for part in others)]
        lines += [ast.unparse(line) for part in ready for line in part.body]
        for part in item.body:
            if isinstance(part, ast.FunctionDef) and part.name.startswith("test"):
                yield from _asserted(part.body, "\n".join(filter(None, lines)))
    elif isinstance(item, ast.FunctionDef) and _tests(item) and not item.args.args:
        yield from _asserted(item.body, prelude)


def _asserted(body: Sequence[ast.stmt], prelude: str) -> Iterator[Probe]:
    """Probes of the values that the statements of one test assert."""
    before = [prelude] if prelude else []
    for line in body:
        setup = "\n".join(before)
        match line:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), name), args)) if name.startswith("assert"):
                if not name.startswith("assertRaises"):
                    yield from (Probe(setup, ast.unparse(value)) for value in args[:2] if not _is_literal(value))
                elif len(args) > 1:
                    yield Probe(setup, ast.unparse(ast.Call(args[1], args[2:], [])), raises=True)
            case ast.Assert(ast.Compare(left, _, rights)):
                yield from (Probe(setup, ast.unparse(value)) for value in (left, *rights) if not _is_literal(value))
            case ast.Assert(test):
                yield Probe(setup, ast.unparse(test))
            case ast.With(items, [ast.Expr(value)]) if "aises" in ast.unparse(items[0].context_expr):
                yield Probe(setup, ast.unparse(value), raises=True)
            case _:
                if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call):  # it may raise an exception
                    yield Probe(setup, ast.unparse(line.value))
                before.append(ast.unparse(line))


def _is_literal(node: ast.expr) -> bool:
    return not any(isinstance(part, ast.Call | ast.Name) for part in ast.walk(node))


# --- variations of literals


def _constants(source: str, texts: Sequence[str]) -> list[int | float | str]:
    """Numbers and texts of the source and the tests, and the numbers next to them."""
    values: dict[int | float | str, None] = {}
    for text in (source, *texts):
        tree = parsed(text)
        for node in ast.walk(tree) if tree is not None else ():
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                values |= dict.fromkeys((value, value + 1, value - 1))
            elif isinstance(value, str) and len(value) < LONGEST:
                values[value] = None
    return list(values)


class _Varied:
    """Draws variations of a probe: mostly one literal changed, sometimes more."""

    def __init__(self, probe: Probe, pool: Sequence[int | float | str], rng: random.Random) -> None:
        self._probe, self._pool, self._rng = probe, pool, rng
        self._tree = parse_python(f"{probe.setup}\n_forge_value = ({probe.value})")
        self._prelude = _prelude_lines(self._tree)

    def draw(self) -> Probe:
        tree = copy.deepcopy(self._tree)
        nodes = [node for item in tree.body[self._prelude :] for node in ast.walk(item) if _varies(node)]
        if not nodes:
            return self._probe
        for node in self._rng.sample(nodes, min(len(nodes), self._rng.choice((1, 1, 1, 2, 3)))):
            self._change(node)
        *setup, last = tree.body
        assert isinstance(last, ast.Assign)
        return replace(self._probe, setup="\n".join(map(ast.unparse, setup)), value=ast.unparse(last.value))

    def _change(self, node: ast.AST) -> None:
        rng = self._rng
        if isinstance(node, ast.Constant):
            node.value = self._other(node.value)
        elif isinstance(node, ast.List | ast.Tuple | ast.Set) and node.elts:
            index = rng.randrange(len(node.elts))
            if rng.random() < 0.4 and (len(node.elts) > 1 or not isinstance(node, ast.Set)):
                del node.elts[index]
            else:
                added = copy.deepcopy(node.elts[index])
                for part in ast.walk(added):
                    if isinstance(part, ast.Constant):
                        part.value = self._other(part.value)
                node.elts.insert(rng.randint(0, len(node.elts)), added)
        elif isinstance(node, ast.Call):  # defaults are values too
            del (node.keywords or node.args)[-1:]
        elif isinstance(node, ast.Dict) and node.keys:
            index = rng.randrange(len(node.keys))
            del node.keys[index], node.values[index]

    def _other(self, value: Any) -> Any:
        rng = self._rng
        if isinstance(value, bool) or value is None:
            return value if value is None else not value
        if isinstance(value, int | float):
            if rng.random() < 0.3:
                return rng.randint(0, 2 * abs(int(value)) + 100)
            near: list[Any] = [value + 1, value - 1, 0, 1, value * 2]
            return rng.choice(near + [item for item in self._pool if isinstance(item, type(value))])
        if isinstance(value, str):
            texts = [item for item in self._pool if isinstance(item, str)]
            if texts and rng.random() < 0.5:
                return rng.choice(texts)
            index = rng.randint(0, len(value))
            piece = rng.choice([*texts, *value, " "])
            return rng.choice(["", value[:index], value[index:], value[:index] + piece + value[index:], piece])
        return value


def _varies(node: ast.AST) -> bool:
    plain = isinstance(node, ast.Constant) and type(node.value) in (int, float, str, bool)
    call = isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > 1
    return plain or call or isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict)


def _prelude_lines(tree: ast.Module) -> int:
    """Number of leading statements that only import and define."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return next((index for index, item in enumerate(tree.body) if not isinstance(item, kinds)), len(tree.body))


# --- running them


@dataclass(frozen=True, slots=True)
class Difference:
    """A probe on which a mutant differs from the gold solution."""

    test: str
    mutant: str
    """The mutant's value, or its exception."""


class Prober:
    """Runs the probes of one task on the gold solution once, and then on mutants."""

    def __init__(
        self,
        engine: SandboxEngine,
        spec: SandboxSpec | None,
        gold: Program,
        chosen: Sequence[Probe],
        errors: Collection[str] = (),
    ) -> None:
        self._engine, self._spec, self._gold = engine, spec, gold
        self._errors = set(errors)
        self._chosen = list(chosen)
        self._expected: list[CallOutcome] | None = None

    @property
    def number(self) -> int:
        """Number of probes on which the gold solution has the same value every time."""
        return len(self._chosen)

    async def ready(self) -> None:
        """Run the probes on the gold solution, twice, and keep those that give the same value."""
        if self._expected is None:
            first, second = await self._run(self._gold, self._chosen), await self._run(self._gold, self._chosen)
            pairs = [
                (probe, one)
                for probe, one, two in zip(self._chosen, first.outcomes, second.outcomes, strict=False)
                if one == two and (one.error is None or probe.raises or one.error in self._errors)
            ]
            pairs = [(probe, one) for probe, one in pairs if one.error not in _MISTAKES]
            pairs.sort(key=lambda pair: pair[0].oddness)  # the first test that tells a mutant is shown
            self._chosen, self._expected = [probe for probe, _ in pairs], [outcome for _, outcome in pairs]

    async def difference(self, mutant: Program) -> Difference | int:
        """The first probe on which the mutant differs, or the number of those on which it agrees.

        The limits of time are for all probes together. If they end the mutant's run, the first probe without a result
        is run again, alone: only if that doesn't end either, the mutant doesn't end.
        """
        await self.ready()
        assert self._expected is not None
        outcomes = (await self._run(mutant, self._chosen)).outcomes
        pairs = list(zip(self._chosen, self._expected, strict=True))
        done = len(outcomes)
        if difference := _first_difference(pairs, outcomes):
            return difference
        if done >= len(pairs):
            return done
        probe, wanted = pairs[done]
        alone = (await self._run(mutant, [probe])).outcomes
        if not alone:
            return Difference(_test(probe, wanted), "does not end")
        return _first_difference([(probe, wanted)], alone) or done + 1

    async def _run(self, program: Program, chosen: Sequence[Probe]) -> CallsResult:
        async with self._engine.session(self._spec) as sandbox:
            if program.files:
                await sandbox.write_files(program.files)
            calls = [probe.call for probe in chosen]
            return await Judging.of(sandbox).run_calls(f"{program.code}\n{_CANON}", calls, limits=LIMITS)


def _first_difference(pairs: Sequence[tuple[Probe, CallOutcome]], got: Sequence[CallOutcome]) -> Difference | None:
    for (probe, wanted), one in zip(pairs, got, strict=False):
        if (one.error, _text(one)) != (wanted.error, _text(wanted)):
            failed = "the lines before it fail" if one.error == "_ForgeSetup" else one.error
            return Difference(_test(probe, wanted), failed or _shown(one))
    return None


_MISTAKES = (
    *("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError"),
    *("SyntaxError", "AttributeError", "_ForgeSetup"),
)
"""Exceptions of a probe that doesn't fit the solution."""


def _text(outcome: CallOutcome) -> str:
    return outcome.value[0] if isinstance(outcome.value, list) else ""


def _shown(outcome: CallOutcome) -> str:
    return outcome.value[1] if isinstance(outcome.value, list) else ""


def _test(probe: Probe, wanted: CallOutcome) -> str:
    shown = _shown(wanted)
    literal = not re.search(r"<[\w.]+ (object|at) ", shown)
    return probe.as_test((shown if literal else None) if wanted.error is None else None, wanted.error or "Exception")
