"""Reward for code that passes tests, which run in a fresh sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge_env.errors import UsageError
from forge_env.rewards.reasons import explain
from forge_env.rewards.spans import last_fenced
from forge_env.sandbox.capabilities import Judging
from forge_env.sandbox.results import CallOutcome
from forge_env.sandbox.spec import Limits
from forge_env.types import Task
from forge_env.visible import shown


def extract_code(response: str) -> str:
    """Extract the last fenced code block, or return the whole response if there is none.

    Args:
        response: the agent's message.

    Examples:
        >>> import forge_env as fe
        >>> fe.rewards.extract_code("Here it is:\\n```python\\nprint(42)\\n```")
        'print(42)\\n'
    """
    block = last_fenced(response)
    return response if block is None else block


@dataclass(eq=False, kw_only=True)
class CodeTests:
    """Fraction of the tests that the answer's code passes; with `all_or_nothing`, 1 or 0.

    `task.data["tests"]` is a list of `{"call": "f(2)", "expected": 4}`. Calls are evaluated in a fresh sandbox
    that agent code has never run in; values are compared outside it, out of the code's reach.

    Examples:
        >>> import forge_env as fe
        >>> rubric = fe.Rubric(fe.rewards.CodeTests(all_or_nothing=False, limits=fe.Limits(wall_s=2)))
        >>> task = fe.Task(id="0", prompt="Write f(x) = 2 x.", data={"tests": [{"call": "f(2)", "expected": 4}]})
    """

    all_or_nothing: bool = True
    """Score 1 if all tests pass, else 0; if False, the fraction that passes."""
    limits: Limits | None = None
    """Limits of each call; None uses the engine's."""

    async def __call__(self, task: Task, completion: str, env: Any) -> float:
        """Score one answer."""
        tests: list[dict[str, Any]] = task.data.get("tests", [])
        if not tests:
            raise ValueError('task.data["tests"] is empty')
        if env is None or env.sandboxes is None:
            raise UsageError("CodeTests runs code and needs sandboxes", fix="fe.make(NAME, sandboxes=engine)")
        async with env.sandboxes.session() as sandbox:
            calls = [test["call"] for test in tests]
            result = await Judging.of(sandbox).run_calls(extract_code(completion), calls, limits=self.limits)
        # Calls that were not reached have no outcome and count as failed.
        reached = [*result.outcomes, *[None] * (len(tests) - len(result.outcomes))]
        failures = [why for outcome, test in zip(reached, tests, strict=True) if (why := _what_failed(outcome, test))]
        if failures:
            explain("failed hidden tests", failures)
        passed = len(tests) - len(failures)
        return float(passed == len(tests)) if self.all_or_nothing else passed / len(tests)


def _what_failed(outcome: CallOutcome | None, test: dict[str, Any]) -> str | None:
    """Describe a failed test: `f(2): expected 4, got 5`; None if the test passed."""
    if outcome is None:
        return f"{test['call']}: not reached"
    if outcome.error is not None:
        return f"{test['call']}: expected {shown(test['expected'])}, raised {outcome.error}: {outcome.message}"
    if _right(outcome, test["expected"]):
        return None
    return f"{test['call']}: expected {shown(test['expected'])}, got {shown(outcome.value)}"


def _right(outcome: CallOutcome, expected: Any) -> bool:
    """Whether value and type are equal: `True` does not equal `1` here."""
    return outcome.error is None and type(outcome.value) is type(expected) and outcome.value == expected
