"""Environments with a sandbox: what is in it, when it comes and goes, what the agent reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import forge_env as fe
from forge_env.environment.sandbox_environment import as_text
from forge_env.errors import EnvironmentBugError, UsageError
from forge_env.sandbox import ExecResult, Sandbox, SandboxEngine
from tests.sandboxes.conftest import require

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[SandboxEngine]:
    require("local")
    async with fe.open_engine("local", concurrency=1, warm=1) as engine:  # one sandbox: a leak would block the next
        yield engine


async def copied(env: Copy) -> float:
    return float(await env.read_text("copy") == "hello")


class Copy(fe.SandboxEnvironment):
    """Copy a file."""

    rubric = fe.Rubric(copied)
    fail_in: str | None = None

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="Copy the file.", split=split)

    def files(self, task: fe.Task) -> dict[str, str | bytes]:
        if self.fail_in == "files":
            raise KeyError("no file")
        return {"folder/file": "hello", "raw": b"\xff"}

    async def setup(self, task: fe.Task) -> None:
        assert await self.read_text("folder/file") == "hello"
        assert await self.read_text("raw") == "\ufffd"
        if self.fail_in == "setup":
            raise KeyError("setup")

    async def cleanup(self) -> None:
        assert self.sandbox is not None
        if self.fail_in == "cleanup":
            raise KeyError("cleanup")

    @fe.tool
    async def bash(self, command: str) -> str:
        """Run a command."""
        return await self.run_bash(command)

    @fe.tool
    async def python(self, code: str) -> str:
        """Run a program."""
        return await self.run_python(code, stdin="given")

    @fe.tool
    async def show(self, path: str) -> str:
        """Show a file."""
        return await self.sandbox.read_text(path)

    @fe.tool
    async def note(self, path: str) -> None:
        """Write a file."""
        await self.sandbox.write_text(path, "ä")


async def test_an_episode(engine: SandboxEngine) -> None:
    env = fe.make(
        "tests.forge_env.environment.test_sandbox_environment:Copy", sandboxes=engine, wall_s=30.0, max_turns=9
    )
    for _ in range(2):
        await env.reset(seed=0)
        said = []
        for message in [
            fe.call_tool("bash", command="cp folder/file copy; exit 3"),
            fe.call_tool("python", code="print(input(), open('copy').read())"),
            fe.call_tool("bash", command="echo \0"),
            fe.call_tool("show", path="../up"),
            fe.call_tool("show", path="nowhere"),
            fe.call_tool("note", path="folder"),
            fe.call_tool("note", path="new"),
            fe.call_tool("show", path="new"),
        ]:
            observation, *_ = await env.step(message)
            said.append(observation[0].content)
        assert said == [
            "[exit code 3]",
            "given hello\n",
            "Error: a command can't contain a NUL character",
            "Error: '../up' is not inside the work folder (use a relative path without '..')",
            "Error: No such file or directory: nowhere",
            "Error: Is a directory: folder",
            "",
            "ä",
        ]
        assert (await env.step("Done."))[1] == 1.0
    await env.close()
    assert isinstance(env, Copy)
    with pytest.raises(UsageError, match="no running episode"):
        await env.read_text("copy")


@pytest.mark.parametrize("leave", ["true", "mkdir copy", "mkfifo copy", "ln -s /dev/zero copy", "ln -s copy copy"])
async def test_what_can_not_be_read_is_no_failure(engine: SandboxEngine, leave: str) -> None:
    env = Copy(sandboxes=engine)
    await env.reset(seed=0)
    await env.step(fe.call_tool("bash", command=leave))
    assert (await env.step("Done."))[1] == 0.0
    await env.close()


@pytest.mark.parametrize("where", ["files", "setup", "cleanup"])
async def test_the_sandbox_goes_back_whatever_fails(engine: SandboxEngine, where: str) -> None:
    env = Copy(sandboxes=engine)
    env.fail_in = where

    async def play() -> None:
        await env.reset(seed=0)
        await env.close()

    with pytest.raises(EnvironmentBugError, match=rf"Copy\.{where} raised KeyError"):
        await play()
    env.fail_in = None
    await env.close()
    async with engine.session() as sandbox:
        assert (await sandbox.run_python("print(1)")).stdout == "1\n"


async def test_without_an_engine_it_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"Copy runs code and needs sandboxes.*sandboxes=engine"):
        await Copy().reset(seed=0)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"exit_code": 0}, "[no output]"),
        ({"exit_code": 0, "stdout": "a\n", "stderr": "b"}, "a\nb"),
        ({"exit_code": 2, "stderr": "b"}, "b\n[exit code 2]"),
        ({"exit_code": None, "signal": 9}, "[signal 9]"),
        ({"exit_code": None, "signal": 9, "timed_out": True, "stdout": "a"}, "a\n[stopped: it took too long]"),
        ({"exit_code": None, "signal": 9, "out_of_memory": True}, "[stopped: it took too much memory]"),
    ],
)
async def test_what_the_agent_reads(result: dict[str, Any], text: str) -> None:
    assert as_text(ExecResult(**result)) == text


class Repaired(fe.SandboxEnvironment):
    """A file to repair, judged by hidden tests, twice."""

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="Repair own.py.", split=split)

    def files(self, task: fe.Task) -> dict[str, str | bytes]:
        return {"own.py": "def f():\n    return 1\n", "conftest.py": "", "data.txt": "7"}

    @fe.tool
    async def bash(self, command: str) -> str:
        """Run a command."""
        return await self.run_bash(command)


@pytest.mark.parametrize(("command", "shares"), [("true", (0.5, 0.0)), ("sed -i s/1/2/ own.py", (1.0, 1.0))])
async def test_hidden_tests_in_fresh_sandbox(engine: SandboxEngine, command: str, shares: tuple[float, float]) -> None:
    seen: list[float] = []

    async def judged(env: Repaired) -> float:
        test = "import unittest\nimport own\nclass T(unittest.TestCase):\n"
        one = test + "    def test_f(self): self.assertEqual(own.f(), 2)\n"
        both = (
            one
            + "    def test_data(self):\n        with open('data.txt') as file: self.assertEqual(file.read(), '7')\n"
        )
        seen.extend([(await env.run_hidden_tests({"test_own.py": text})).share for text in (both, one)])
        with pytest.raises(UsageError, match="released for a fresh one"):
            await env.sandbox.read_text("own.py")
        assert (await env.read_text("./data.txt"), await env.read_text("none")) == ("7", None)
        return seen[0]

    class Judged(Repaired):
        rubric = fe.Rubric(judged)

    env = Judged(sandboxes=engine)
    for _ in range(2):  # an engine of one sandbox: the agent's own must have been given back
        await env.reset(seed=0)
        await env.step(fe.call_tool("bash", command=f"{command}; sleep 100 &"))
        _, reward, terminated, _, _ = await env.step("Done.")
        assert (reward, terminated) == (shares[0], True)
    await env.close()
    assert tuple(seen) == shares * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leave", "reward", "not_moved"),
    [
        ("mkdir -p s/t; echo 1 > s/t/x; chmod 0 s/t/x s/t s own.py data.txt .", 1.0, None),
        ('python3 -c \'import os\nfor _ in range(3000): os.mkdir("d"); os.chdir("d")\'', 1.0, None),
        ("rm own.py; mkfifo own.py", 0.0, None),
        ("rm own.py; ln -s own.py own.py", 0.0, None),
        ("for n in 1 2 3 4 5 6 7 8 9; do head -c 15M /dev/zero > $n; done", 0.0, 1.0),
    ],
    ids=["locked", "deep", "a pipe", "a loop", "too much"],
)
async def test_leftovers_are_scored(engine: SandboxEngine, leave: str, reward: float, not_moved: float | None) -> None:
    """It can neither have the episode left out of statistics nor its task set aside."""

    async def judged(env: Repaired) -> float:
        test = "import unittest\nimport own\nclass T(unittest.TestCase):\n"
        return (await env.run_hidden_tests({"test_own.py": f"{test}    def test_f(self): own.f()\n"})).share

    class Judged(Repaired):
        sandbox_spec = fe.SandboxSpec(disk_mb=256)
        rubric = fe.Rubric(judged)

    env = Judged(sandboxes=engine)
    await env.reset(seed=0)
    await env.step(fe.call_tool("bash", command=leave))
    _, scored, terminated, _, info = await env.step("Done.")
    assert (scored, terminated, info["metrics"].get("not_moved")) == (reward, True, not_moved)
    await env.close()


BESIDE = "import sys\nfrom own import f\ndef test(): assert sys.path and f() == 1\n"
COMPARED = "from own import Box\ndef test(): assert Box() == Box()\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "tests"),
    [("def f(): return 1\n", BESIDE), ("class Box:\n    def __eq__(self, other): return True\n", COMPARED)],
    ids=["beside", "apart"],
)
async def test_scores_that_are_not_cheat_proof(engine: SandboxEngine, code: str, tests: str) -> None:
    class Judged(Repaired):
        rubric = fe.Rubric(lambda env: judged(env))

    async def judged(env: Repaired) -> float:
        return float((await env.run_hidden_tests({"test_own.py": tests})).passed)

    async def played(**options: bool) -> tuple[float, dict[str, float]]:
        env = Judged(Judged.config_class(**options), sandboxes=engine)
        try:
            await env.reset(seed=0)
            await env.sandbox.write_files({"own.py": code})
            _, reward, _, _, info = await env.step("Done.")
        finally:
            await env.close()
        return reward, info["metrics"]

    reward, metrics = await played()
    assert (reward, metrics["not_cheat_proof"]) == (1.0, 1.0)
    if tests is BESIDE:
        with pytest.raises(fe.ForgeError, match="not cheat-proof"):
            await played(require_cheat_proof=True)
    else:
        reward, metrics = await played(require_cheat_proof=True)
        assert (reward, metrics.get("not_cheat_proof")) == (0.0, None)


async def size(sandbox: Sandbox) -> int:
    found = await sandbox.run_python("import os\nfolder = os.statvfs('.')\nprint(folder.f_blocks * folder.f_frsize)")
    return int(found.stdout) >> 20


async def sizes(env: fe.SandboxEnvironment) -> float:
    """MiB of the episode's sandbox, where that is also the size of a fresh one."""
    own = await size(env.sandbox)
    async with env.fresh_sandbox() as fresh:
        return float(own * (own == await size(fresh)))


class Sized(fe.SandboxEnvironment):
    """Tasks differ in the sandbox that they are played in."""

    rubric = fe.Rubric(sizes)
    max_reward = 16.0

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="Look.", data={"size": 8 * (1 + index)}, split=split)

    def spec_of(self, task: fe.Task) -> Any:
        return fe.SandboxSpec(disk_mb=task.data["size"]) if task.data["size"] else {"disk_mb": 8}


async def test_each_task_has_the_sandbox_that_it_asks_for(engine: SandboxEngine) -> None:
    env = Sized(sandboxes=engine)
    for index in (1, 0, 1):
        await env.reset(options={"split": "train", "index": index})
        assert (await env.step("Done."))[1] == 8 * (1 + index)
    with pytest.raises(EnvironmentBugError, match=r"Sized\.spec_of returned a dict.*fe\.SandboxSpec"):
        await env.reset(options={"task": fe.Task(id="x", prompt="x", data={"size": 0})})
    await env.close()
