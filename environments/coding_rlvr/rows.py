"""Tasks from rows in the style of MBPP, HumanEval, HumanEval+, LiveCodeBench and APPS, from a file or the hub.

Each style is scored as by its original checker, except that only the call of the agent's function runs in the agent's
process (see `checks` and `asserts`). Rows with a test that can't be run in this way are skipped.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import logging
import pickle
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

from environments.coding_rlvr.asserts import Suite, suite_of
from environments.coding_rlvr.checks import METHOD, PLAIN, Check, Setup
from forge_env.concurrency import parse_python
from forge_env.errors import UsageError
from forge_env.tasks.datasets import DatasetConfig, MissingColumn, StreamedTasks, from_text, load_tasks
from forge_env.types import Task

log = logging.getLogger(__name__)
PROMPT_COLUMNS = ("prompt", "text", "question_content", "question")
STYLES = ("mbpp", "humaneval", "livecodebench", "apps")
PUBLIC = 1
"""Number of tests that the agent is shown, unless the row specifies them; the others are hidden."""
_STARRED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
LIVE_CODE_BENCH_IMPORTS = "\n".join(
    [
        *(f"from {name} import *" for name in _STARRED),
        f"import {', '.join(_STARRED)}",
        "sys.setrecursionlimit(50000)",
        "sys.set_int_max_str_digits(0)",
    ]
)
"""Imports that LiveCodeBench's checker puts before a program: answers use `List` and `deque` without importing them."""
PROGRAM: Setup = {"before": LIVE_CODE_BENCH_IMPORTS, "after": ""}
"""Set-up for code that reads standard input."""
SOLUTION: Setup = {"before": LIVE_CODE_BENCH_IMPORTS, "after": PLAIN + METHOD}
"""Set-up for code that defines a class `Solution` or a function."""
ROW_SYSTEM_PROMPT = (
    "Solve the task in Python. Call python(code) to try your code on the tests, "
    "then answer with all of the code in one ```python block."
)


def load_rows(config: DatasetConfig, split: str) -> Sequence[Task]:
    """Every usable row of a split as a task, read once per process.

    Raises:
        UsageError: the rows have an unknown style, or none can be used.
    """
    return _load(config.model_dump_json(), split)


@lru_cache(maxsize=16)
def _load(config_json: str, split: str) -> Sequence[Task]:
    config = DatasetConfig.model_validate_json(config_json)
    raw = load_raw(config, split)
    if isinstance(raw, StreamedTasks):
        raise UsageError("rows of programming tasks can't be streamed", fix="set streaming: false, and num_tasks")
    tasks = [task for row in raw if (task := as_task(row)) is not None]
    if not tasks:
        raise UsageError(f"{config.path} has no usable row", fix=f"rows must have the style of {', '.join(STYLES)}")
    if len(tasks) < len(raw):
        text = "%s, %s: skipped %d of %d rows, whose tests can't be judged outside the process of the code"
        log.warning(text, config.path, split, len(raw) - len(tasks), len(raw))
    return tasks


def load_raw(config: DatasetConfig, split: str) -> Sequence[Task] | StreamedTasks:
    """The rows, with the prompt from the column of their style unless the recipe names one."""
    if "prompt" in config.columns:
        return load_tasks(config, split)
    missing: MissingColumn | None = None
    for column in PROMPT_COLUMNS:
        columns = config.columns if column == "prompt" else {**config.columns, "prompt": column}
        try:
            return load_tasks(config.model_copy(update={"columns": columns}), split)
        except MissingColumn as error:
            missing = missing or error
    assert missing is not None
    raise missing


def as_task(row: Task) -> Task | None:
    """Convert a row into a task; None if a test can't be run outside the agent's process."""
    data = row.data
    if "test_list" in data:
        made = _mbpp(row)
    elif "entry_point" in data and "test" in data:
        made = _human_eval(row)
    elif "public_test_cases" in data:
        made = _live_code_bench(row)
    elif "input_output" in data:
        made = _apps(row)
    else:
        raise UsageError(
            f"row {row.id!r} has an unknown style, with the columns {', '.join(data)}",
            fix="MBPP has test_list, HumanEval entry_point and test, LiveCodeBench public_test_cases, "
            "APPS input_output",
        )
    if made is None or not (made.public or made.hidden):
        return None
    answer = None if made.gold is None else f"```python\n{made.gold.strip()}\n```"
    checks = {"public": made.public, "hidden": made.hidden, "public_setup": made.setup}
    return row.model_copy(update={"prompt": made.prompt, "data": checks, "gold": answer, "tags": [*row.tags, "rows"]})


def checks_of(task: Task) -> list[Check]:
    """Checks that determine the reward: for a dataset row all, as in its original checker; otherwise hidden ones."""
    return [*(task.data["public"] if "public_setup" in task.data else []), *task.data["hidden"]]


class _Made(NamedTuple):
    prompt: str
    public: list[Check]
    hidden: list[Check]
    setup: Setup
    gold: str | None


def _mbpp(row: Task) -> _Made | None:
    """MBPP row: `text` (or `prompt`), `test_list` of asserts, `code`, `test_imports`, `test_setup_code`."""
    data = row.data
    code = data.get("code") or row.gold
    tests, more, imports = (_sources(data.get(name)) for name in ("test_list", "challenge_test_list", "test_imports"))
    suite = suite_of(
        [*tests, *more],
        imports="\n".join(imports),
        setup=data.get("test_setup_code") or "",
        reference=code or "",
    )
    if suite is None:
        return None
    public, hidden = suite.checks[:PUBLIC], suite.checks[PUBLIC:]
    return _Made(f"{row.prompt.strip()}\n{_shown(public)}", public, hidden, suite.setup, code)


def _sources(value: Any) -> list[str]:
    """Python sources in a list, in a list written as text, or in a single text."""
    value = from_text(value) or []
    return [value] if isinstance(value, str) else list(value)


def _shown(checks: Sequence[Check]) -> str:
    return "\n".join(
        f"{check['call']} == {check['expected']}" if check["expected"] else check["call"] for check in checks
    )


def _human_eval(row: Task) -> _Made | None:
    """HumanEval row: `prompt` (function head), `test` (function `check`), `entry_point`, `canonical_solution`."""
    name, test, body = row.data["entry_point"], row.data["test"], row.data.get("canonical_solution")
    try:
        tree = parse_python(test)
        cases = _cases_of_check(tree, name)
        asserts = _asserts_of_check(tree, name)
        given = [item for item in parse_python(f"{row.prompt}\n    pass\n").body if getattr(item, "name", "") != name]
    except (SyntaxError, ValueError):
        return None
    imports = ast.unparse(ast.Module(given, []))  # the prompt's imports and helpers

    def suite(*statements: str) -> Suite | None:
        return suite_of(statements, imports=imports, names=[name])

    if cases is not None:
        whole = suite(*cases)
    else:
        whole = suite(asserts) if asserts is not None else suite(f"{test}\ncheck({name})")
    if whole is None:
        return None
    for check in whole.checks if cases is not None else ():
        if check["compare"] == "equal":
            check["compare"] = "close"
    public = whole.checks[:PUBLIC] if len(whole.checks) > PUBLIC else []
    gold = None if body is None else row.prompt + body
    prompt = f"Complete the function {name}.\n```python\n{row.prompt.strip()}\n```"
    return _Made(prompt, public, whole.checks[len(public) :], whole.setup, gold)


def _cases_of_check(tree: ast.Module, name: str) -> list[str] | None:
    """Asserts for the cases of HumanEval+, whose `check` loops over literal `inputs` and `results`, comparing real
    numbers approximately; None for other tests."""
    checks = [item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name == "check"]
    match [item for check in checks for item in check.body]:
        case [
            ast.Assign(targets=[ast.Name(id="inputs")], value=inputs),
            ast.Assign(targets=[ast.Name(id="results")], value=results),
            ast.For(body=[ast.Expr(value=ast.Call(func=ast.Name(id="assertion"), args=[called, *_]))]),
        ] if ast.unparse(called) == "candidate(*inp)":
            try:
                cases = [*zip(ast.literal_eval(inputs), ast.literal_eval(results), strict=True)]
                return [f"assert {name}({', '.join(map(repr, given))}) == {expected!r}" for given, expected in cases]
            except (ValueError, TypeError):  # results that are computed
                return None
    return None


def _asserts_of_check(tree: ast.Module, name: str) -> str | None:
    """The asserts of the function `check`, about the function `name`; None if it does more than assert."""
    functions = [item for item in tree.body if isinstance(item, ast.FunctionDef)]
    others = [item for item in tree.body if not isinstance(item, ast.FunctionDef | ast.Assign)]
    if others or [function.name for function in functions] != ["check"] or len(functions[0].args.args) != 1:
        return None
    (check,) = functions
    if not all(isinstance(item, ast.Assert | ast.Pass | ast.Expr) for item in check.body):
        return None
    given = check.args.args[0].arg
    for node in ast.walk(check):
        if isinstance(node, ast.Name) and node.id == given:
            node.id = name
    return ast.unparse(ast.Module(check.body, []))


def _live_code_bench(row: Task) -> _Made | None:
    """LiveCodeBench row: `public_test_cases` and `private_test_cases`, with input and output of a program or method."""
    data = row.data
    metadata = _decoded(data.get("metadata"), {})
    head = data.get("starter_code") or ""
    function = next(filter(None, map((metadata or {}).get, ("func_name", "fn_name"))), None) or _method_of(head)
    try:
        public = list(_cases(data["public_test_cases"], function))
        hidden = list(_cases(data.get("private_test_cases"), function))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"row {row.id!r}: a test case can't be read: {error}",
            fix='cases are {"input", "output", "testtype"}; functional ones hold JSON and need metadata.func_name',
        ) from error
    if len({"stdin" in check for check in [*public, *hidden]}) > 1:
        return None
    how = (
        f"Complete the class.\n```python\n{head}\n```" if function else "Read standard input, print to standard output."
    )
    return _Made(f"{row.prompt.strip()}\n{how}", public, hidden, SOLUTION if function else PROGRAM, row.gold)


def _apps(row: Task) -> _Made | None:
    """APPS row: `question`, `input_output` with lists of inputs and outputs, `starter_code`, `solutions`."""
    data = row.data
    cases, solutions = _decoded(data["input_output"], {}), _decoded(data.get("solutions"), [])
    head, function = data.get("starter_code") or "", cases.get("fn_name")
    try:
        checks = [*map(_apps_check, cases.get("inputs") or [], cases.get("outputs") or [], repeat(function))]
    except TypeError as error:
        fix = "input_output has inputs, each with a text or the arguments of fn_name, and outputs"
        raise UsageError(f"row {row.id!r}: a test case can't be read: {error}", fix=fix) from error
    how = "Read standard input, print to standard output."
    if function:
        how = f"Complete the code.\n```python\n{head}\n```" if head.strip() else f"Write the function {function}."
    setup = SOLUTION if function else PROGRAM
    gold = row.gold if row.gold is not None else next(iter(solutions), None)
    return _Made(f"{row.prompt.strip()}\n{how}", checks[:PUBLIC], checks[PUBLIC:], setup, gold)


def _apps_check(given: Any, output: Any, function: str | None) -> Check:
    if function is None:
        stdin, expected = (
            "\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (given, output)
        )
        return {"call": f"input {stdin[:60]!r}", "expected": expected, "compare": "output", "stdin": stdin}
    arguments = ", ".join(map(repr, given))
    run = f"_forge_plain(_forge_method({function!r})({arguments}))"
    return {"call": f"{function}({arguments})", "expected": json.dumps(output), "compare": "wrapped", "run": run}


def _method_of(head: str) -> str | None:
    """Name of the first public method or function in the starter code."""
    return next((name for name in re.findall(r"^[ \t]*def (\w+)\(", head, re.MULTILINE) if name[0] != "_"), None)


def _cases(value: Any, function: str | None) -> Iterator[Check]:
    for case in _decoded(value, []):
        given, output = str(case["input"]), str(case["output"])
        if (case.get("testtype") or ("functional" if function else "stdin")) == "functional":
            if function is None:
                raise ValueError("the name of the method is missing")
            arguments = ", ".join(repr(json.loads(line)) for line in given.split("\n") if line.strip())
            json.loads(output)
            run = f"_forge_plain(_forge_method({function!r})({arguments}))"
            yield {"call": f"Solution().{function}({arguments})", "expected": output, "compare": "json", "run": run}
        else:
            yield {"call": f"input {given[:60]!r}", "expected": output, "compare": "output", "stdin": given}


def _decoded(value: Any, default: Any) -> Any:
    """Decode JSON, either plain or as LiveCodeBench packs its hidden cases: pickled, compressed and base64-encoded."""
    if not isinstance(value, str):
        return default if value is None else value
    if not value.strip():
        return default
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        packed = zlib.decompress(base64.b64decode(value, validate=True))
        return json.loads(_TextOnly(io.BytesIO(packed)).load())
    except (ValueError, TypeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise UsageError(f"test cases can't be read: {value[:40]!r}... ({error})") from error


class _TextOnly(pickle.Unpickler):
    """Unpickler for text only; it rejects everything that could execute code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the pickle refers to {module}.{name}, but only text is allowed")
