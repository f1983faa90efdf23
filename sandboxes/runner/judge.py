"""Running tests of judged code, in the sandbox.

*Apart*: the tests run in this process, and the judged code in another one, which they reach over a channel
(`sandboxes.runner.mirrors`). The verdict leaves over a descriptor that the judged code does not have.

*Counted*: one process runs both and reports the outcome of every test, but no verdict: several such processes run the
suite, each with some tests changed so that they must fail, and `sandboxes.suite` compares the outcomes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, NoReturn

from . import testing
from .mirrors import Solution
from .objects import send
from .solution import SOLUTION
from .testing import MAX_MESSAGE, text_of

if TYPE_CHECKING:
    from .child import Request

_MAX_FAILURES = 50


def run_tests(request: Request) -> None:
    """Run the tests against the code behind the request's channel; the verdict goes to its other descriptor."""
    header = request.header
    folder = os.getcwd()
    solution = Solution(request.channel, header["judged"], folder, header["sync"])
    verdict = _Verdict()
    try:
        if request.code:
            module = solution.module(SOLUTION)
            sys.modules[SOLUTION] = module
            testing.run_source("tests.py", request.code, {**module.namespace(), "__name__": "tests"}, verdict)
        else:
            _find_around_tests(solution, header["around"])
            sys.meta_path.insert(0, _Only(solution, [*header["around"], *_hidden_by_folders(header["judged"])]))
            sys.meta_path.append(solution)  # last, so that it can't hide other modules
            run_suite(request, verdict, [folder])
    except BaseException as error:  # noqa: BLE001  broken code or a broken test file is a verdict too
        verdict.finish("", "failed", f"{type(error).__name__}: {text_of(error)}")
    send(request.verdict, {**verdict.summary(), "doubts": solution.doubts.notes})


def _find_around_tests(solution: Solution, packages: Sequence[str]) -> None:
    """Make judged packages importable that contain test files: pytest names a test module after its folders."""
    for name in packages:
        for folder in solution.folders(name):
            if os.path.isdir(folder) and not os.path.exists(path := os.path.join(folder, "__init__.py")):
                with open(path, "x"):
                    pass


def _hidden_by_folders(names: Sequence[str]) -> list[str]:
    """Judged modules that a folder without `__init__.py` would hide: site-packages often contains a `bin`."""
    specs = {name: PathFinder.find_spec(name) for name in names if "." not in name}
    return [name for name, spec in specs.items() if spec is not None and spec.loader is None]


class _Only:
    """Import finder for only these judged modules."""

    def __init__(self, solution: Solution, names: Sequence[str]) -> None:
        self._solution = solution
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return self._solution.find_spec(name) if name in self._names else None


def run_suite(request: Request, recorder: testing.Recorder, roots: Sequence[str]) -> None:
    """Run the test files of a request, which are in the current folder."""
    paths: list[str] = request.header["paths"]
    if request.header["pytest"]:
        testing.run_pytest(paths, recorder, roots)
    else:
        sys.path += roots
        testing.run_files({path: request.files[path] for path in paths}, recorder)


class _Verdict(testing.Recorder):
    """Counts tests and keeps a line for each failure."""

    def __init__(self) -> None:
        self.total = 0
        self.failures: list[str] = []
        self.failed = 0
        self.outcomes: dict[str, str] = {}

    def finish(self, test: str, outcome: str, message: str = "") -> None:
        self.total += outcome != "skipped"
        if self.outcomes.get(test) != "failed":
            self.outcomes[test] = outcome
        if outcome == "failed":
            self.failed += 1
            self.failures.append(f"{test}: {message}" if test else message)

    def summary(self) -> dict[str, Any]:
        """The verdict in the form that is sent."""
        failures = [line[:MAX_MESSAGE] for line in self.failures[:_MAX_FAILURES]]
        outcomes = list(self.outcomes.items())
        return {"total": self.total, "failed": self.failed, "failures": failures, "outcomes": outcomes}


def run_beside(request: Request) -> NoReturn:
    """Run the tests in the process of the code they judge, and report each outcome."""
    leave = os._exit
    reporter = _Reporter(request.channel)
    run_suite(request, reporter, testing.source_roots(os.getcwd()))
    reporter.end()
    sys.stdout.flush()
    leave(0)  # skips exit handlers of the judged code


class _Reporter(testing.Recorder):
    """Sends each outcome as `[test, outcome, message]`, and `["", "end", number of outcomes]` at the end."""

    __slots__ = ("_channel", "_finished")

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._finished = 0

    def finish(self, test: str, outcome: str, message: str = "") -> None:
        self._finished += 1
        send(self._channel, [test, outcome, message[:200]])

    def end(self) -> None:
        send(self._channel, ["", "end", str(self._finished)])
