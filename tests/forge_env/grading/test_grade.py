"""What `forge-env grade` says of good and of weak tasks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import forge_env as fe
from forge_env.cli.main import main
from forge_env.errors import InfrastructureError
from forge_env.grading.grade import _LISTING, Grader, doubts, duplicates, state_after
from forge_env.grading.probes import Difference, Probe, Prober, Program, probes, raised_in
from forge_env.grading.results import TaskGrade, Tried
from forge_env.rollout.episode import run_episode
from forge_env.sandbox import CallOutcome, CallsResult, ExecResult, SandboxEngine
from forge_env.sandbox.engines import LazyEngine
from tests.sandboxes.conftest import engine_fixture

engine = engine_fixture()
GOLD = """def over(xs, limit=6):
    if limit < 0:
        raise ValueError("limit")
    count = 0
    for x in xs:
        if x > limit:
            count += 1
    return count
"""
TESTS = (
    "import unittest\nfrom over import over\nclass T(unittest.TestCase):\n"
    "    def test_some(self): self.assertEqual([over([3, 7, 9]), over([3, 7, 9], 8), over([], 1)], [2, 1, 0])\n"
)
MORE = (
    "    def test_at(self): self.assertEqual([over([6], 6), over([5, 1, 7, 6], 5), over([6, 7]), over([0], 0)],"
    " [0, 2, 1, 0])\n"
    "    def test_error(self):\n        with self.assertRaises(ValueError): over([1], -1)\n"
)


class Over(fe.SandboxEnvironment):
    """Write a function, judged by hidden tests."""

    editor = fe.tools.files(name="edit")
    submit = fe.tools.submit(with_answer=False)
    tests: ClassVar[str] = TESTS + MORE

    def __init__(self, config: fe.EnvironmentConfig | None = None, **context: object) -> None:
        self.rubric = fe.Rubric(hidden)
        super().__init__(config, **context)

    def num_tasks(self, split: str) -> int:
        return int(split == "train")

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=split, split=split, prompt="Write over(xs, limit=6).", data={"tests": self.tests})

    def gold_files(self, task: fe.Task) -> Mapping[str, str]:
        return {"over.py": GOLD}

    def hand_in(self, task: fe.Task, files: Mapping[str, str]) -> list[str | fe.Message]:
        writing = [fe.call_tool("edit", command="create", path=path, file_text=text) for path, text in files.items()]
        return [*writing, fe.call_tool("submit")]


async def hidden(env: Over, task: fe.Task) -> float:
    return float((await env.run_hidden_tests({"test_over.py": task.data["tests"]})).passed)


class Weak(Over):
    tests = TESTS


async def graded(cls: type[fe.Environment], engine: SandboxEngine) -> tuple[TaskGrade, list[Tried]]:
    env = cls(sandboxes=engine)
    (task,), tried = await Grader(lambda: cls(sandboxes=engine), mutants=40).run([env.task("train", 0)])
    return task, tried


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_weak_tests_are_named_with_a_test_that_is_missing(engine: SandboxEngine) -> None:
    _, tried = await graded(Weak, engine)
    alive = {(one.kind, one.change): one for one in tried if one.verdict == "accepted"}
    boundary = alive["boundary", "x > limit -> x >= limit"]
    names: dict[str, object] = {}
    exec(GOLD, names)
    exec(boundary.test.removeprefix("from over import over\n"), names)  # the gold solution passes it
    exec(boundary.text, names)
    with pytest.raises(AssertionError):
        exec(boundary.test.removeprefix("from over import over\n"), names)
    assert "pytest.raises(ValueError)" in alive["dropped line", "if limit < 0: -> pass"].test


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_strong_tests_leave_only_equivalent_mutants(engine: SandboxEngine) -> None:
    task, tried = await graded(Over, engine)
    assert {one.verdict for one in tried} <= {"rejected", "equivalent"}
    assert task.counts["rejected"] > 10
    assert (task.gold, task.problem, task.unjudged) == ([1.0, 1.0, 1.0], "", [])


class Sums(fe.SingleTurnEnvironment):
    """Sums, of which every answer between the right one and ten more is accepted."""

    kindness: ClassVar[int] = 10

    def __init__(self, config: fe.EnvironmentConfig | None = None, **context: object) -> None:
        kindness = self.kindness
        self.rubric = fe.Rubric(lambda answer, task: float(0 <= _number(answer) - int(task.gold) <= kindness))
        super().__init__(config, **context)

    def num_tasks(self, split: str) -> int:
        return 4 if split == "train" else 0

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt=f"{index % 3} + 40?", gold=str(index % 3 + 40))


class Strict(Sums):
    kindness = 0


class Paid(Sums):
    """Pays for every answer."""

    def __init__(self, config: fe.EnvironmentConfig | None = None, **context: object) -> None:
        super().__init__(config, **context)
        self.rubric = fe.Rubric(lambda answer: 1.0)


class Silent(Sums):
    """Has no gold solutions."""

    def __init__(self, config: fe.EnvironmentConfig | None = None, **context: object) -> None:
        super().__init__(config, **context)
        self.rubric = fe.Rubric(lambda answer: float(answer == "forty"))

    def task(self, split: str, index: int) -> fe.Task:
        return super().task(split, index).model_copy(update={"gold": None, "data": {"n": 1}})


def _number(text: str) -> int:
    return int(text) if text.strip().lstrip("-").isdecimal() else -1


class Code(Sums):
    """Accepts every function."""

    def __init__(self, config: fe.EnvironmentConfig | None = None, **context: object) -> None:
        super().__init__(config, **context)
        self.rubric = fe.Rubric(lambda answer: float("return" in answer))

    def task(self, split: str, index: int) -> fe.Task:
        return super().task(split, index).model_copy(update={"gold": "def f(x):\n    return x + 1"})


async def test_a_lost_sandbox_leaves_mutants_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(self: Prober, mutant: Program) -> int:
        raise InfrastructureError("no sandbox")

    monkeypatch.setattr(Prober, "difference", lost)
    async with LazyEngine("auto") as engine:
        _, tried = await graded(Code, engine)
    assert {(one.verdict, one.note) for one in tried} == {("undecided", "could not be tried: no sandbox")}


async def test_a_lost_gold_solution_is_noted_and_the_rest_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(*args: Any, task: fe.Task, **more: Any) -> fe.Trajectory:
        played = await run_episode(*args, task=task, **more)
        return replace(played, valid=False, error="no sandbox") if task.id == "train-0" else played

    monkeypatch.setattr("forge_env.grading.grade.run_episode", play)
    tasks, tried = await Grader(Sums, mutants=3).run([Sums().task("train", index) for index in (0, 1)])
    assert [task.note for task in tasks] == ["its gold solution could not be judged: no sandbox", ""]
    assert {one.task for one in tried} == {"train-1"}


class Slow(Prober):
    """Ends the run of the mutant after 60 probes, and then evaluates one, or none."""

    alone: ClassVar[list[CallOutcome]] = []

    async def _run(self, program: Program, chosen: Sequence[Probe]) -> CallsResult:
        same = [CallOutcome(["1", "1"]) for _ in chosen]
        if program.code == "mutant":
            same = same[:60] if len(chosen) > 1 else self.alone
        return CallsResult(same, ExecResult(0))


@pytest.mark.parametrize(
    ("alone", "result"),
    [
        ([], Difference("assert f(70) == 1", "does not end")),
        ([CallOutcome(["2", "2"])], Difference("assert f(70) == 1", "2")),
        ([CallOutcome(["1", "1"])], 61),
    ],
)
async def test_a_probe_does_not_end_if_it_does_not_end_alone(
    alone: list[CallOutcome], result: Difference | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "alone", alone)
    prober = Slow(LazyEngine("auto"), None, Program("gold", {}), [Probe("", f"f({n})") for n in range(10, 100)])
    assert await prober.difference(Program("mutant", {})) == result


def test_states_of_many_files_are_compared_in_full(tmp_path: Path) -> None:
    def state() -> str:
        return subprocess.run(["sh", "-c", _LISTING], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    for number in range(600):
        (tmp_path / f"{number:0100}").touch()
    before = state()
    (tmp_path / f"{300:0100}").write_text("x")
    assert len(before) < 100
    assert state() != before


async def test_a_state_that_is_not_seen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(*args: Any, **more: Any) -> fe.Trajectory:
        return replace(await run_episode(*args, **more), valid=False)

    monkeypatch.setattr("forge_env.grading.grade.run_episode", play)
    with pytest.raises(InfrastructureError, match="work folder"):
        await state_after(Sums, Sums().task("train", 0), ["40"])


def grade(tmp_path: Path, name: str, *more: str) -> tuple[int, dict[str, object]]:
    code = main(["grade", f"{__name__}:{name}", "--out", str(tmp_path), *more])
    return code, json.loads((tmp_path / "grade.json").read_text())


def test_numbers_and_exit_code_of_a_grade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, weak = grade(tmp_path, "Sums", "--fail-under", "90")
    assert code == 1
    assert weak["schema"] == 1
    assert weak["rejected"]["value"] < 0.8
    assert weak["rejected"]["low"] < weak["rejected"]["value"] < weak["rejected"]["high"]
    shown = capsys.readouterr().out
    assert "40 -> 41" in shown
    assert "!! train-3 is the same task as train-0" in shown
    code, strict = grade(tmp_path, "Strict", "--fail-under", "100")
    assert (code, strict["survivors"]) == (0, [])
    assert strict["rejected"]["low"] < 1.0


def test_a_judge_that_accepts_everything_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = grade(tmp_path, "Paid", "--fail-under", "0")
    assert code == 1
    assert "!! an emptied solution has the full reward: train-0 and 3 more" in capsys.readouterr().out


def test_without_gold_solutions_the_rest_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, card = grade(tmp_path, "Silent")
    shown = capsys.readouterr()
    assert code == 0
    assert "no task has a gold solution" in shown.err
    assert card["rejected"] is None
    assert "same seed, same episode" in [check["name"] for check in card["checks"]]


@pytest.mark.parametrize("more", [("--mutants", "0"), ("--fail-under", "101"), ("--num-tasks", "0")])
def test_bad_numbers_are_refused(more: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", f"{__name__}:Strict", "--out", str(tmp_path / "out"), *more]) == 2
    assert "  -> use " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_duplicates_have_the_same_prompt_and_hidden_data() -> None:
    one = fe.Task(id="1", split="train", prompt="Two  words", gold="a")
    two, three = one.model_copy(update={"id": "2", "prompt": "two words"}), one.model_copy(update={"gold": "b"})
    assert list(duplicates([one, two, three])) == [("1", "2")]


def test_a_network_is_a_doubt() -> None:
    class Online(Over):
        sandbox_spec = fe.SandboxSpec(network=True)

    env = Online()
    assert [text for text in doubts(env, [env.task("train", 0)]) if "network" in text]


def test_probes_come_from_calls_asserts_and_unittest() -> None:
    data = {"call": "f([1, 2])", "tests": TESTS, "list": ["assert f([3]) == 3"], "prose": "f is a function."}
    task = fe.Task(id="1", split="train", prompt="Write f.\n>>> f([5])\n", data=data)
    made = probes(task, ["f", "over"], "def f(xs): return 0", "")
    values = {probe.value for probe in made}
    assert {"f([1, 2])", "f([3])", "f([5])"} <= values
    assert any(probe.setup.startswith("from over import over") for probe in made)
    assert len(values) > 100


def test_exceptions_that_code_raises_by_name_are_results() -> None:
    assert raised_in("def f(x):\n    if x: raise ValueError('no')\n    raise errors.Odd") == {"ValueError", "Odd"}
