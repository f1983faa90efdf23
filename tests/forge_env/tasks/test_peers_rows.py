"""The lines of docs/environments/tasks.md load rows as other frameworks and benchmarks publish them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.tasks.datasets import StreamedTasks

PAGE = Path(__file__).parents[3] / "docs" / "environments" / "tasks.md"
LINES = dict(
    re.findall(r"^\| ([^|`]+) \| `(fe\..+)` \|$", PAGE.read_text().partition("<!-- rows -->")[2], re.MULTILINE)
)
SYSTEM = {"role": "system", "content": "Answer inside \\boxed{}."}
ADD = '    """Add."""\n'
HUMAN_EVAL = """

def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(0, 0) == 0
"""
HUMAN_EVAL_PLUS = """

import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float)

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match


def check(candidate):
    inputs = [[1, 2], [0.1, 0.2], [5, -5]]
    results = [3, 0.3, 0]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""


def user(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"{number} + 1?"}


def verl(number: int) -> dict[str, Any]:
    truth = {"style": "rule", "ground_truth": str(number + 1)}
    extra = {"index": number, "split": "train", "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "x"}}}}
    return {"data_source": "sums", "prompt": [SYSTEM, user(number)], "reward_model": truth, "extra_info": extra}


def trl(number: int) -> dict[str, Any]:
    said = {"role": "assistant", "content": str(number + 1)}
    if number:
        return {"prompt": [SYSTEM, user(number)], "completion": [said]}
    return {"prompt": user(number)["content"], "completion": said["content"]}


def prime_rl(number: int) -> dict[str, Any]:
    info = json.dumps({"ground_truth": str(number + 1)})
    return {
        "problem_id": f"p{number}",
        "task_type": "math",
        "prompt": user(number)["content"],
        "verification_info": info,
    }


def mbpp(number: int) -> dict[str, Any]:
    return {
        "task_id": number + 2,
        "text": "Write a function to add one.",
        "code": "def inc(x):\r\n    return x + 1",
        "test_list": ["assert inc(1) == 2", "assert inc(2) == 3"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def humaneval(number: int) -> dict[str, Any]:
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": f"def add(x, y):\n{ADD}",
        "canonical_solution": "    return x + y\n",
        "entry_point": "add",
        "test": HUMAN_EVAL_PLUS if number else HUMAN_EVAL,
    }


def livecodebench(number: int) -> dict[str, Any]:
    cases = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "4", "output": "5", "testtype": "stdin"}]
    return {
        "question_title": "inc",
        "question_content": "Add one.",
        "question_id": f"abc{number}",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(cases[:1]),
        "private_test_cases": json.dumps(cases),
        "metadata": "{}",
    }


def apps(number: int) -> dict[str, Any]:
    program = {"inputs": ["1\n", ["2", ""]], "outputs": ["2\n", ["3"]]}
    functions = {"fn_name": "inc", "inputs": [[1], [2]], "outputs": [[2], 3]}
    answers = ["print(int(input()) + 1)", "class Solution:\n    def inc(self, x):\n        return x + 1"]
    return {
        "problem_id": number,
        "question": "Add one.",
        "solutions": json.dumps([answers[number % 2]]),
        "input_output": json.dumps(functions if number % 2 else program),
        "difficulty": "introductory",
        "url": "https://example.org",
        "starter_code": "class Solution:\n    def inc(self, x):\n        " if number % 2 else "",
    }


SOLUTION = "It is \\boxed{{{}}}."
ROWS: dict[str, Any] = {
    "verl": verl,
    "trl": trl,
    "verifiers": lambda n: {"question": user(n)["content"], "answer": str(n + 1), "info": {"a": [n]}, "task": "sums"},
    "prime_rl": prime_rl,
    "gsm8k": lambda n: {"question": user(n)["content"], "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"},
    "math": lambda n: {"problem": user(n)["content"], "level": "Level 5", "type": "Algebra",
                       "solution": SOLUTION.format(n + 1)},
    "math_500": lambda n: {"problem": user(n)["content"], "solution": "So.", "answer": str(n + 1), "subject": "Algebra",
                           "level": n + 1, "unique_id": f"test/{n}.json"},
    "numina_math": lambda n: {"source": "olympiads", "problem": user(n)["content"], "solution": SOLUTION.format(n + 1),
                              "messages": [user(n), {"role": "assistant", "content": SOLUTION.format(n + 1)}]},
    "mmlu": lambda n: {"question": user(n)["content"], "subject": "sums", "choices": ["3", "2", "1", "0"],
                       "answer": [2, 1, 0][n]},
    "arc": lambda n: {"id": f"Mercury_{n}", "question": user(n)["content"], "answerKey": "ABC"[n],
                      "choices": {"text": ["1", "2", "3"], "label": ["A", "B", "C"]}},
    "mbpp": mbpp,
    "humaneval": humaneval,
    "livecodebench": livecodebench,
    "apps": apps,
}  # fmt: skip
"""The row of each file with a number."""
FILES = {name: re.findall(r'"(\w+)\.(jsonl|parquet)"', line)[0] for name, line in LINES.items()}
CODE = [name for name, line in LINES.items() if "coding_rlvr" in line]


def load(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write three rows as published, and run the line of the page."""
    file, kind = FILES[name]
    rows = [ROWS[file](number) for number in range(3)]
    monkeypatch.chdir(folder)
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), f"{file}.parquet")
    else:
        Path(f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return eval(LINES[name], {"fe": fe})


def test_every_row_is_on_the_page() -> None:
    assert sorted(file for file, _ in FILES.values()) == sorted(ROWS)


@pytest.mark.parametrize("name", [name for name in LINES if name not in CODE])
def test_the_line_of_the_page_loads_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(name, tmp_path, monkeypatch)
    tasks = [loaded.task("train", n) for n in range(3)] if isinstance(loaded, fe.Environment) else list(loaded)
    assert not isinstance(loaded, StreamedTasks)
    assert [task.prompt.partition("\n")[0] for task in tasks] == [user(number)["content"] for number in range(3)]
    letters = {"MMLU": "CBA", "ARC": "ABC"}
    for number, task in enumerate(tasks):
        answer = letters[name][number] if name in letters else str(number + 1)
        assert fe.rewards.MathReward()("", f"So: \\boxed{{{answer}}}", task.gold) == 1.0
        assert fe.rewards.MathReward()("", "So: \\boxed{77}", task.gold) == 0.0
    if name in letters:
        assert re.search(r"\n\nA\. \d\nB\. \d\n", tasks[0].prompt)
        assert "choices" not in tasks[0].data
    if name in ("verl", "TRL, with texts or conversations"):
        assert [message.to_openai() for message in tasks[2].history] == [SYSTEM]
    if name == "verl":
        assert tasks[1].data["extra_info"]["index"] == 1
    if name == "MATH-500":
        assert [task.difficulty for task in tasks] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", CODE)
async def test_the_line_of_the_page_loads_programs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_env.rollout.episode import run_episode
    from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy

    env = load(name, tmp_path, monkeypatch)
    tasks = [env.task("train", number) for number in range(3)]
    async with fe.open_engine("local", concurrency=1, warm=0) as engine:

        def make() -> fe.Environment:
            return fe.make("coding_rlvr", dataset=f"{FILES[name][0]}.jsonl", sandboxes=engine)

        for task in tasks[:2]:  # HumanEval and HumanEval+, programs and functions of APPS
            if task.gold is not None:
                gold = await run_episode(make, GoldPolicy(), task=task)
                assert (gold.error, gold.reward) == (None, 1.0), gold.failures
            wrong = await run_episode(
                make, ReplayPolicy(["```python\ndef inc(x): return 7\nadd = inc\n```"]), task=task
            )
            assert (wrong.error, wrong.reward) == (None, 0.0)
