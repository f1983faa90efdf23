"""An engine of five methods, and what works on it without a capability."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.errors import SandboxFileError, SandboxFileNotFoundError, UsageError
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.sandbox import ExecResult, Interpreters, Judging, Sandbox, SandboxEngine, SandboxSpec
from tests.forge_env.sandbox.plain import PlainEngine, PlainSandbox

CORE = {"acquire", "release", "exec", "read_file", "write_file"}


def plain_engine(folder: Path) -> PlainEngine:
    return PlainEngine(PlainSandbox(folder))


class Notes(fe.SandboxEnvironment):
    bash = fe.tools.bash()

    async def _noted(env: Any) -> float:
        return float(await env.read_text("note.txt") == "hello")

    rubric = fe.Rubric(_noted)

    def files(self, task: fe.Task) -> dict[str, str]:
        return {"name.txt": "note.txt"}

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt="Write hello into the file that name.txt names.", split=split)


def test_an_engine_has_five_abstract_methods() -> None:
    assert SandboxEngine.__abstractmethods__ | Sandbox.__abstractmethods__ == CORE


async def test_an_episode_needs_no_more_than_these(tmp_path: Path) -> None:
    engine = plain_engine(tmp_path)
    policy = ReplayPolicy([fe.call_tool("bash", command="printf hello > $(cat name.txt)"), "done"])
    trajectory = await run_episode(lambda: Notes(sandboxes=engine), policy, seed=0)
    assert (trajectory.reward, engine.released) == (1.0, 1)


async def test_conveniences_follow_from_the_five(tmp_path: Path) -> None:
    async with plain_engine(tmp_path) as engine, engine.session() as sandbox:
        ran = await sandbox.run_python("import m; print(m.X, input())", stdin="in\n", files={"m.py": "X = 1"})
        assert ran.stdout == "1 in\n"
        await sandbox.write_files({"a/b c": b"\xff", "a/d": "text"})
        assert await sandbox.read_files("a") == {"b c": b"\xff", "d": b"text"}
        assert await sandbox.read_text("a/d") == "text"
        with pytest.raises(SandboxFileNotFoundError, match="nope"):
            await sandbox.read_files("nope")


async def test_a_missing_capability_is_a_usage_error(tmp_path: Path) -> None:
    sandbox = PlainSandbox(tmp_path)
    with pytest.raises(UsageError, match="PlainSandbox can't judge code"):
        Judging.of(sandbox)
    with pytest.raises(UsageError, match="PlainSandbox can't keep sessions of an interpreter"):
        Interpreters.of(sandbox)


@pytest.mark.parametrize("fields", [{"packages": ("numpy",)}, {"writable": ("/app",)}, {"allow": ("example.com",)}])
def test_a_simple_engine_refuses_what_it_does_not_know(tmp_path: Path, fields: dict[str, Any]) -> None:
    engine = plain_engine(tmp_path)
    with pytest.raises(UsageError, match=f"the plain engine has no '{next(iter(fields))}'"):
        engine.check(SandboxSpec(**fields))
    engine.check(SandboxSpec(memory_mb=64))


async def test_a_long_listing_is_an_error(tmp_path: Path) -> None:
    class Cut(PlainSandbox):
        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            return ExecResult(0, truncated=True)

    with pytest.raises(SandboxFileError, match="can't be listed"):
        await Cut(tmp_path).read_files()
