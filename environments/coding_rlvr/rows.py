"""Tasks from rows in the style of MBPP, HumanEval and LiveCodeBench, from a file or the hub.

What a row's tests compare is taken apart: the call goes into the sandbox, the expected value stays outside, where the
agent's code can't reach it. A test that can't be taken apart so (`assert abs(f(x) - y) < 1e-6`, loops) would have to
be judged beside the code it judges, so it is left out; a row left with no test is left out as a whole.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import logging
import pickle
import zlib
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from forge_env.concurrency import parse_python
from forge_env.errors import UsageError
from forge_env.sandbox import CallOutcome, CallsResult, ExecResult, Limits, Sandbox
from forge_env.tasks.datasets import DatasetConfig, MissingColumn, StreamedTasks, load_tasks
from forge_env.types import Task

log = logging.getLogger(__name__)
PROMPT_COLUMNS = ("prompt", "text", "question_content")
STYLES = ("mbpp", "humaneval", "livecodebench")
PUBLIC = 1
"""Tests of a row that the agent is shown, where the row doesn't say; the others are hidden."""
Check = dict[str, str]
"""`{"call", "expected"}` as Python source; with `stdin`, the call is the whole program and its output is expected."""
ROW_SYSTEM_PROMPT = (
    "Solve the task in Python. Call python(code) to try your code on the tests, "
    "then answer with all of the code in one ```python block."
)


def load_rows(config: DatasetConfig, split: str) -> Sequence[Task]:
    """Every usable row of a split as a task, read once a process.

    Raises:
        UsageError: the rows are of no known style, or none can be used.
    """
    return _load(config.model_dump_json(), split)


@lru_cache(maxsize=16)
def _load(config_json: str, split: str) -> Sequence[Task]:
    config = DatasetConfig.model_validate_json(config_json)
    raw = load_raw(config, split)
    if isinstance(raw, StreamedTasks):
        raise UsageError("rows of programming tasks are read whole", fix="set streaming: false, and a limit")
    tasks = [task for row in raw if (task := as_task(row)) is not None]
    if not tasks:
        raise UsageError(f"{config.path} has no usable row", fix=f"rows are in the style of {', '.join(STYLES)}")
    if len(tasks) < len(raw):
        text = "%s, %s: %d of %d rows have no test that can be judged outside; left out"
        log.warning(text, config.path, split, len(raw) - len(tasks), len(raw))
    return tasks


def load_raw(config: DatasetConfig, split: str) -> Sequence[Task] | StreamedTasks:
    """The rows, whose prompt is in the column that their style has for it where the recipe doesn't say."""
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
    """A row as a task; None when none of its tests can be judged outside."""
    data = row.data
    if "test_list" in data:
        made = _mbpp(row)
    elif "entry_point" in data and "test" in data:
        made = _human_eval(row)
    elif "public_test_cases" in data:
        made = _live_code_bench(row)
    else:
        raise UsageError(
            f"row {row.id!r} is of no known style: it has {', '.join(data)}",
            fix="MBPP has test_list, HumanEval entry_point and test, LiveCodeBench public_test_cases",
        )
    prompt, public, hidden, gold = made
    if not hidden:
        return None
    answer = None if gold is None else f"```python\n{gold.strip()}\n```"
    checks = {"public": public, "hidden": hidden}
    return row.model_copy(update={"prompt": prompt, "data": checks, "gold": answer, "tags": [*row.tags, "rows"]})


Made = tuple[str, list[Check], list[Check], str | None]


def _divided(prompt: str, checks: list[Check], gold: str | None) -> Made:
    public, hidden = checks[:PUBLIC], checks[PUBLIC:]
    shown = "\n".join(f"{check['call']} == {check['expected']}" for check in public)
    return f"{prompt.strip()}\n{shown}", public, hidden, gold


def _mbpp(row: Task) -> Made:
    """`text` (or `prompt`), `test_list` of asserts, `code`."""
    tests = [*row.data["test_list"], *row.data.get("challenge_test_list", [])]
    checks = [check for test in tests for check in checks_of(test)]
    return _divided(row.prompt, checks, row.data.get("code") or row.gold)


def _human_eval(row: Task) -> Made:
    """`prompt` (the head of the function), `test` (a function `check`), `entry_point`, `canonical_solution`."""
    name = row.data["entry_point"]
    checks = checks_of(row.data["test"], rename={"candidate": name})
    body = row.data.get("canonical_solution")
    gold = None if body is None else row.prompt + body
    _, public, hidden, _ = _divided(row.prompt, checks, None)
    return f"Complete the function {name}.\n```python\n{row.prompt.strip()}\n```", public, hidden, gold


def _live_code_bench(row: Task) -> Made:
    """`public_test_cases` and `private_test_cases`: input and output of a program, or arguments of a method."""
    data = row.data
    metadata = _decoded(data.get("metadata"), {})
    function = metadata.get("func_name") if isinstance(metadata, dict) else None
    public = list(_cases(data["public_test_cases"], function))
    hidden = list(_cases(data.get("private_test_cases"), function)) or public
    head = data.get("starter_code") or ""
    how = (
        f"Complete the class.\n```python\n{head}\n```" if function else "Read standard input, print to standard output."
    )
    return f"{row.prompt.strip()}\n{how}", public, hidden, row.gold


def _cases(value: Any, function: str | None) -> Iterator[Check]:
    for case in _decoded(value, []):
        if case.get("testtype") == "functional" or function:
            arguments = [json.loads(line) for line in str(case["input"]).splitlines() if line.strip()]
            call = f"Solution().{function}({', '.join(map(repr, arguments))})"
            yield {"call": call, "expected": repr(json.loads(case["output"]))}
        else:
            given = str(case["input"])
            yield {"call": f"input {given[:60]!r}", "expected": repr(_lines(str(case["output"]))), "stdin": given}


async def run_checks(sandbox: Sandbox, code: str, tests: Sequence[Mapping[str, Any]], limits: Limits) -> CallsResult:
    """Run calls together, programs one by one; outcomes are in order, and judged by the caller."""
    if not tests or "stdin" not in tests[0]:
        return await sandbox.run_calls(code, [test["call"] for test in tests], limits=limits)
    outcomes: list[CallOutcome] = []
    result = ExecResult(exit_code=0)
    for test in tests:
        result = await sandbox.run_python(code, stdin=test["stdin"], limits=limits)
        if not result.ok:
            break
        outcomes.append(CallOutcome(value=_lines(result.stdout)))
    return CallsResult(outcomes, replace(result, stdout=""))  # output is compared, not shown


def _lines(text: str) -> str:
    """Output as it is compared: white space at the end of lines and of the text doesn't matter."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _decoded(value: Any, default: Any) -> Any:
    """JSON, plain or as LiveCodeBench packs its hidden cases: pickled, compressed, in base 64."""
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
        raise UsageError(f"test cases that can't be read: {value[:40]!r}... ({error})") from error


class _TextOnly(pickle.Unpickler):
    """Reads pickled text and refuses everything that a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


def checks_of(source: str, rename: Mapping[str, str] | None = None) -> list[Check]:
    """The asserts in `source` that compare a call with a literal, as checks.

    Args:
        source: statements, or functions that hold them.
        rename: names to be replaced in the calls.
    """
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError):
        return []
    if rename:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in rename:
                node.id = rename[node.id]
    statements = [item for node in tree.body for item in (node.body if isinstance(node, ast.FunctionDef) else [node])]
    found = (_check(item.test) for item in statements if isinstance(item, ast.Assert))
    return [check for check in found if check is not None]


def _check(test: ast.expr) -> Check | None:
    if isinstance(test, ast.Call):
        return {"call": ast.unparse(test), "expected": "True"}
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and isinstance(test.operand, ast.Call):
        return {"call": ast.unparse(test.operand), "expected": "False"}
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is)):
        return None
    left, right = test.left, test.comparators[0]
    if not isinstance(left, ast.Call):
        left, right = right, left
    if not isinstance(left, ast.Call):
        return None
    try:
        value = literal_eval(right)
    except (ValueError, TypeError, SyntaxError):
        return None
    return {"call": ast.unparse(left), "expected": repr(value)}
