"""Shell tasks on a real engine: what makes them done, and what doesn't."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import forge_env as fe
from environments.terminal import Terminal
from environments.terminal.families import FAMILIES
from environments.terminal.state import Entry, problems
from forge_env.errors import ConfigError
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy
from forge_env.sandbox import WORK, SandboxEngine
from forge_env.types import Message
from forge_env.validation.checks import Validator
from tests.sandboxes.conftest import WITH_SLOW_DOCKER, engine_fixture

pytestmark = pytest.mark.asyncio(loop_scope="module")


engine = engine_fixture(*WITH_SLOW_DOCKER, concurrency=4, warm=2)


def bash(command: str) -> Message:
    return fe.call_tool("bash", command=command)


async def start(engine: SandboxEngine, **options: Any) -> Terminal:
    env = fe.make("terminal", sandboxes=engine, **options)
    assert isinstance(env, Terminal)
    await env.reset(options={"split": "train", "index": 0})
    return env


async def test_every_kind_is_done_by_its_command_and_by_nothing_less(engine: SandboxEngine) -> None:
    for name in FAMILIES:
        env = fe.make("terminal", sandboxes=engine, families=[name])
        task = env.task("train", 0)
        trajectory = await run_episode(lambda: fe.make("terminal", sandboxes=engine), GoldPolicy(), task=task)
        assert trajectory.reward == 1.0, (name, trajectory)
        await env.reset(options={"task": task})
        _, reward, terminated, *_ = await env.step("Done.")
        assert (reward, terminated) == (0.0, True), name
        await env.close()


async def test_the_agent_reads_output_and_errors(engine: SandboxEngine) -> None:
    env = await start(engine, wall_s=60.0, cpu_s=1.0)
    for command, said in [
        ("echo hello; cd /tmp", "hello\n"),
        ("pwd", f"{WORK}\n"),
        ("true", "[no output]"),
        ("cat nothing", "cat: nothing: No such file or directory\n\n[exit code 1]"),
        ("exit 3", "[exit code 3]"),
        ("kill -9 $$", "[signal 9]"),
    ]:
        observation, *_ = await env.step(bash(command))
        assert observation[0].content == said
    observation, *_ = await env.step(bash("while true; do :; done"))
    assert "took too long" in observation[0].content
    observation, *_ = await env.step(bash("echo \0"))
    assert observation[0].content.startswith("Error:")
    await env.close()


@pytest.mark.parametrize(
    "trick",
    [
        # Python start-up files and modules that would make the one who looks believe anything.
        "mkdir -p .local; for m in json os stat base64 sitecustomize usercustomize; do echo 'print([])' > $m.py; done",
        f"printf 'import sys\\nprint([]); sys.exit()' > json.py; export PYTHONPATH={WORK} PYTHONSTARTUP={WORK}/json.py",
        # A process that would go on changing things.
        "(setsid sh -c 'while true; do echo 1 > count.txt; sleep 0.01; done' >/dev/null 2>&1 &)",
        # Replacing the programs themselves.
        f"cp /bin/true python3; PATH={WORK}:$PATH; ln -sf {WORK}/python3 /usr/bin/python3; alias python3=true",
        # So much that it can't be looked at.
        "mkdir many; for i in $(seq 1 700); do echo > many/$i; done",
        "i=0; while [ $i -lt 80 ]; do mkdir d && cd d; i=$((i+1)); done",
        # No file at all, one that never ends, one that can't be read.
        "mkfifo count.txt", "ln -s /dev/zero count.txt", "echo 1 > count.txt; chmod 000 count.txt",
        "head -c 3000000 /dev/zero > count.txt", "mkdir count.txt", "ln -s app.log count.txt",
        "printf '\\377\\376' > count.txt", "touch $(printf 'a\\377b')", f"rm -rf {WORK}/* {WORK}; chmod 000 {WORK}",
    ],
)  # fmt: skip
async def test_tricks_give_nothing(engine: SandboxEngine, trick: str) -> None:
    env = await start(engine, families=["count_lines"], wall_s=30.0, cpu_s=1.0)
    await env.step(bash(trick))
    _, reward, terminated, _, info = await env.step("Done.")
    assert (reward, terminated, info["metrics"]["commands"]) == (0.0, True, 1.0)
    await env.close()


async def test_nothing_of_the_expected_state_is_inside(engine: SandboxEngine) -> None:
    env = await start(engine, families=["sort_unique"])
    observation, *_ = await env.step(bash("find . ; cat * ; env; ls -la /tmp / 2>/dev/null"))
    assert env.current_task.data["state"]["sorted.txt"] not in observation[0].content
    await env.close()


@pytest.mark.slow
async def test_it_is_sound(engine: SandboxEngine) -> None:
    validator = Validator(lambda: fe.make("terminal", sandboxes=engine), num_tasks=1)
    checks = [check async for check in validator.run()]
    assert {check.status for check in checks} <= {"ok", "note"}, checks


async def test_tasks_of_the_splits_differ() -> None:
    env = fe.make("terminal")
    prompts = {split: {str(env.task(split, i).data) for i in range(100)} for split in ("train", "eval")}
    assert not prompts["train"] & prompts["eval"]
    with pytest.raises(ConfigError, match="'flying' is not a valid kind"):
        fe.make("terminal", families=["flying"])


async def test_what_counts_as_different() -> None:
    rng = Random(0)
    for family in FAMILIES.values():
        work = family(rng)
        before = {path: Entry("file", text=text) for path, text in work.files.items()}
        assert problems(work.expected, before), work.prompt
    assert problems({}, None) == ["there are too many files"]
    assert problems({"a": "1"}, {"a": Entry("file", text="1 \n\n")}) == []
    assert problems({"a": "1"}, {"a": Entry("link", link="b")}) == ["a: has the wrong content"]
    assert problems({"a": {"folder": True}}, {"a": Entry("folder")}) == []
