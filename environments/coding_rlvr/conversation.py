"""Message formats: the system prompt, the tool's report, and the parsing of code from final answers."""

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
"""Final answer that submits the code tried last; any other answer without code does the same."""
MAX_VALUE = 60
"""Maximum characters shown of a returned value, an exception's message, or printed output."""

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?```", re.DOTALL)


def as_answer(code: str) -> str:
    """The final answer that submits `code`."""
    return f"```python\n{code}\n```"


def code_of(answer: str) -> str | None:
    """The code of the last fenced block of an answer, or None if it has none."""
    blocks: list[str] = _BLOCK.findall(answer)
    return blocks[-1] if blocks else None


def report(total: int, failed: Sequence[str], *, printed: str = "") -> str:
    """Format the tool's report: how many tests passed, the first of `failures`, and what the code printed."""
    lines = [f"{total - len(failed)}/{total} passed", *failed[:1]]
    if printed.strip():
        lines.append(f"printed: {_short(printed.strip())}")
    return "\n".join(lines)


def failures(tests: Sequence[Check], outcomes: Sequence[CallOutcome], ended: str = "") -> list[str]:
    """One line for each failed test, such as `f(2) returned 3, expected 4`; `ended` is why outcomes are missing."""
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
