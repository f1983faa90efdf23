"""Cheats that `validate` hands in: environments that pay for them fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

import forge_env as fe
from forge_env.environment.optional import gold_actions
from forge_env.errors import EnvironmentBugError
from forge_env.sandbox import SandboxEngine
from forge_env.validation import cheats
from forge_env.validation.checks import Check, Validator
from tests.sandboxes.conftest import engine_fixture

pytestmark = pytest.mark.asyncio(loop_scope="module")
GOLD = "def double(x):\n    return 2 * x\n"
TESTS = (
    "import unittest\nfrom own import double\nclass T(unittest.TestCase):\n"
    "    def test_double(self): self.assertEqual(double(4), 8)\n"
)


engine = engine_fixture()


class Repository(fe.SandboxEnvironment):
    """A package with a function to write; how it is judged is left to subclasses."""

    editor = fe.tools.files(name="edit")
    submit = fe.tools.submit(with_answer=False)
    seen: bool = False

    def num_tasks(self, split: str) -> int:
        return 1

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=split, split=split, prompt="Write double(x) in own.py.")

    def files(self, task: fe.Task) -> Mapping[str, str | bytes]:
        return {"own.py": "", **({"tests/test_own.py": TESTS} if self.seen else {})}

    def gold_files(self, task: fe.Task) -> Mapping[str, str]:
        return {"own.py": GOLD}

    def hand_in(self, task: fe.Task, files: Mapping[str, str]) -> list[str | fe.Message]:
        writing = [fe.call_tool("edit", command="create", path=path, file_text=text) for path, text in files.items()]
        return [*writing, fe.call_tool("submit")]


async def exit_code(env: Repository) -> float:
    await env.sandbox.write_text("test_own.py", TESTS)
    return float((await env.sandbox.exec(["python3", "-m", "unittest", "test_own"])).ok)


async def printed(env: Repository) -> float:
    await env.sandbox.write_text("test_own.py", TESTS)
    result = await env.sandbox.exec(["python3", "-m", "unittest", "test_own"])
    return float(result.stderr.rstrip().endswith("OK"))


async def by_tests_of_the_agent(env: Repository) -> float:
    tests = await env.sandbox.read_files("tests")
    return float((await env.run_hidden_tests({f"tests/{path}": text for path, text in tests.items()})).passed)


async def hidden(env: Repository) -> float:
    return float((await env.run_hidden_tests({"test_own.py": TESTS})).passed)


class ByExitCode(Repository):
    rubric = fe.Rubric(exit_code)


class ByOutput(Repository):
    rubric = fe.Rubric(printed)


class ByTestsInReach(Repository):
    rubric = fe.Rubric(by_tests_of_the_agent)
    seen = True


class ByHiddenTests(Repository):
    rubric = fe.Rubric(hidden)
    seen = True


async def hidden_beside(env: Repository) -> float:
    return float((await env.run_hidden_tests({"test_own.py": TESTS}, how="counted")).passed)


class ByTestsBeside(Repository):
    rubric = fe.Rubric(hidden_beside)


class InABlock(fe.SingleTurnEnvironment):
    """Code in the answer, judged as subclasses say."""

    def task(self, split: str, index: int) -> fe.Task:
        data = {"tests": [{"call": "double(4)", "expected": 8}]}
        return fe.Task(
            id=f"{split}-{index}", split=split, prompt="Write double.", gold=f"```python\n{GOLD}```", data=data
        )


async def runs(answer: str, env: fe.Environment) -> float:
    async with env.sandboxes.session() as sandbox:
        return float((await sandbox.run_python(f"{fe.rewards.extract_code(answer)}\nassert double(4) == 8")).ok)


class BlockByExitCode(InABlock):
    rubric = fe.Rubric(runs)


class BlockByCalls(InABlock):
    rubric = fe.Rubric(fe.rewards.CodeTests())


class InAnArgument(fe.ToolEnvironment):
    """Code in a tool's argument."""

    rubric = fe.Rubric(runs)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="Write double.")

    def gold_actions(self, task: fe.Task) -> list[str | fe.Message]:
        return [fe.call_tool("hand_over", code=GOLD)]

    @fe.tool
    def hand_over(self, code: str) -> str:
        """Hand in code."""
        self.submit(code)
        return "thanks"


async def cheats_check(make: Callable[[], fe.Environment]) -> Check:
    found = [check async for check in Validator(make, num_tasks=1).run()]
    (gold,) = [check for check in found if check.name == "gold solutions score full marks"]
    assert gold.status == "ok", gold
    (check,) = [check for check in found if check.name == "cheats earn nothing"]
    return check


@pytest.mark.parametrize("kind", [ByExitCode, ByOutput, ByTestsInReach, BlockByExitCode, InAnArgument])
@pytest.mark.slow
async def test_what_pays_cheats_is_found(engine: SandboxEngine, kind: Callable[..., fe.Environment]) -> None:
    check = await cheats_check(lambda: kind(sandboxes=engine))
    assert check.status == "failed", check
    assert "gives 1 to the cheat" in check.detail
    assert "judge with run_tests or run_calls" in check.detail


@pytest.mark.parametrize("kind", [ByHiddenTests, BlockByCalls])
@pytest.mark.slow
async def test_what_does_not_is_sound(engine: SandboxEngine, kind: Callable[..., fe.Environment]) -> None:
    check = await cheats_check(lambda: kind(sandboxes=engine))
    assert check.status == "ok", check
    tried = int(check.detail.split()[0])
    assert tried == 2 * (len(cheats.CODE) + (len(cheats.BESIDE) + 1 if kind is ByHiddenTests else 0))


@pytest.mark.parametrize(("kind", "status"), [(ByHiddenTests, "ok"), (ByTestsBeside, "open")])
async def test_tests_beside_the_judged_code_are_not_called_cheat_proof(
    engine: SandboxEngine, kind: Callable[..., fe.Environment], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cheats, "CODE", {})
    monkeypatch.setattr(cheats, "BESIDE", {})
    found = [check async for check in Validator(lambda: kind(sandboxes=engine), num_tasks=1).run()]
    (check,) = [check for check in found if check.name == "hidden tests are cheat-proof"]
    assert check.status == status, check


async def test_where_no_code_is_judged_nothing_is_tried() -> None:
    class Plain(fe.SingleTurnEnvironment):
        rubric = fe.Rubric(fe.rewards.exact_match)

        def task(self, split: str, index: int) -> fe.Task:
            return fe.Task(id=f"{split}{index}", split=split, prompt="Say 4.", gold="4", data={"answer": "4"})

    check = await cheats_check(Plain)
    assert check.status == "note"  # nothing was exercised
    assert check.detail == "nothing to try: no gold solution submits Python code (see gold_files)"


async def test_gold_files_without_hand_in_are_named() -> None:
    class Half(ByHiddenTests):
        hand_in = None

    with pytest.raises(EnvironmentBugError, match="Half has gold_files but no hand_in"):
        gold_actions(Half(), Half().task("train", 0))


@pytest.mark.parametrize("depth", [150, 400, 5000])
def test_code_that_is_nested_too_deeply_has_no_names_or_no_stub(depth: int) -> None:
    code = f"def g(): pass\nx = {'-' * depth}1\n"
    assert cheats.defined_names(code) == (["g"] if depth < 5000 else [])
    assert bool(cheats.stub_of(code)) == (depth == 150)


async def test_cheats_are_python_and_do_nothing() -> None:
    stub = cheats.stub_of(
        "from __future__ import annotations\nimport os\nclass A:\n    def f(self): return 1\ndef g(): return 2\n"
    )
    names: dict[str, object] = {}
    exec(compile(stub, "stub", "exec"), names)
    assert names["g"]() is None
    for name, make in cheats.CODE.items():
        compile(make(stub, ["A", "g"]), name, "exec")
