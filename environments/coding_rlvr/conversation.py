"""What is said: the system prompt, a tool's report, and how code is read from a final answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from environments.coding_rlvr.checks import Check, passes
from forge_env.sandbox import CallOutcome
from forge_env.visible import shown

SYSTEM_PROMPT = (
    "Write the Python function f. Call python(code) to try your code on the tests. Then answer with the function "
    "in one ```python block, or say Done to submit what you tried last."
)
DONE = "Done"
"""What submits the code that was tried last: any answer without code does."""
MAX_VALUE = 60
"""Characters shown of a returned value, an exception's text and of what the code printed."""

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?```", re.DOTALL)


def as_answer(code: str) -> str:
    """The final answer that submits `code`."""
    return f"```python\n{code}\n```"


def code_of(answer: str) -> str | None:
    """The code of the last fenced block of an answer, or None when there is none."""
    blocks: list[str] = _BLOCK.findall(answer)
    return blocks[-1] if blocks else None


def report(tests: Sequence[Check], outcomes: Sequence[CallOutcome], *, printed: str = "", ended: str = "") -> str:
    """What the agent is told: how many tests passed, and what was wrong with the first that didn't.

    Args:
        tests: the public tests.
        outcomes: of their calls in order; fewer where the program ended early.
        printed: what the code wrote to stdout.
        ended: why calls are missing ("timed out", ...).
    """
    failed = failures(tests, outcomes, ended)
    lines = [f"{len(tests) - len(failed)}/{len(tests)} passed", *failed[:1]]
    if printed.strip():
        lines.append(f"printed: {_short(printed.strip())}")
    return "\n".join(lines)


def failures(tests: Sequence[Check], outcomes: Sequence[CallOutcome], ended: str = "") -> list[str]:
    """A line for each test that failed: `f(2) returned 3, expected 4`.

    Args:
        tests: in order.
        outcomes: of their calls; fewer where the program ended early.
        ended: why calls are missing.
    """
    reached: list[CallOutcome | None] = [*outcomes, *[None] * (len(tests) - len(outcomes))]
    pairs = zip(tests, reached, strict=True)
    return [
        f"{test['call']} {_what_happened(test, outcome, ended)}" for test, outcome in pairs if not passes(test, outcome)
    ]


def _what_happened(test: Check, outcome: CallOutcome | None, ended: str) -> str:
    if outcome is None:
        return ended or "was not reached"
    if outcome.error is not None:
        return f"raised {outcome.error}" + (f": {_short(outcome.message)}" if outcome.message else "")
    return f"returned {shown(outcome.value, MAX_VALUE)}, expected {test['expected']}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."
