"""A stand-alone coding agent: a loop around an `openai` client, independent of forge-env.

It runs the model's code on `tests.json` and writes the submission to `solution.py`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from openai import APIStatusError, OpenAI

SYSTEM = (
    "Write the Python function f. Call python(code) to try your code on the tests. Then answer with the function "
    "in one ```python block, or say Done to submit what you tried last."
)
PARAMETERS = {
    "additionalProperties": False,
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
    "type": "object",
}
PYTHON: Any = {"name": "python", "description": "Run code on the tests.", "parameters": PARAMETERS}
MOST_REQUESTS = 6
PROBE = """\
import json, sys
from solution import f
for call, expected in json.loads(sys.argv[1]):
    try:
        value = eval(call)
    except BaseException as error:
        print(json.dumps([False, call, f"raised {type(error).__name__}: {error}"]), flush=True)
        continue
    wanted = eval(expected)
    right = type(value) is type(wanted) and value == wanted
    print(json.dumps([right, call, f"returned {value!r}, expected {expected}"]), flush=True)
"""


def submit(code: str) -> None:
    """Write `code` to `solution.py`, replacing any earlier submission."""
    with open("solution.py", "w") as file:
        file.write(code)


def report(code: str, tests: list[dict[str, str]]) -> str:
    """Submit and test `code`; report how many tests passed and the first failure."""
    submit(code)
    pairs = json.dumps([[test["call"], test["expected"]] for test in tests])
    try:
        ran = subprocess.run([sys.executable, "-c", PROBE, pairs], capture_output=True, text=True, timeout=5)
        lines, ended = ran.stdout.splitlines(), f"failed: {(ran.stderr.strip() or 'nothing').splitlines()[-1][:80]}"
    except subprocess.TimeoutExpired as error:
        lines, ended = (error.stdout or b"").decode().splitlines(), "timed out"
    results = [json.loads(line) for line in lines if line.startswith("[")]
    results += [[False, test["call"], ended] for test in tests[len(results) :]]
    wrong = [f"{call} {outcome}"[:160] for right, call, outcome in results if not right]
    return "\n".join([f"{len(results) - len(wrong)}/{len(tests)} passed", *wrong[:1]])


def answer_of(name: str, arguments: str, tests: list[dict[str, str]]) -> str:
    """The result of a tool call, or a usage hint if the call is malformed."""
    try:
        code = json.loads(arguments)["code"]
    except (ValueError, LookupError, TypeError):
        code = None
    if name != "python" or not isinstance(code, str):
        return 'call python with {"code": "..."}'
    return report(code, tests)


def finish(said: str) -> None:
    """Print the final answer; submit its last code block, if it has one."""
    if blocks := re.findall(r"```(?:python|py)?[ \t]*\n(.*?)\n?```", said, re.DOTALL):
        submit(blocks[-1])
    print(said)


def main(task: str) -> None:
    """Solve the task and write `solution.py`."""
    with open("tests.json") as file:
        tests = json.load(file)
    client = OpenAI()
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for _ in range(MOST_REQUESTS):
        try:
            completion = client.chat.completions.create(
                model="coder", messages=messages, tools=[{"type": "function", "function": PYTHON}]
            )
        except APIStatusError as error:  # such as an exceeded limit: the code tried last stays submitted
            print(error)
            return
        reply = completion.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        calls: Any = reply.tool_calls or []
        if not calls:
            finish(reply.content or "")
            return
        for call in calls:
            answer = answer_of(call.function.name, call.function.arguments, tests)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})


if __name__ == "__main__":
    main(sys.argv[1])
