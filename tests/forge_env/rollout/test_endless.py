"""Code of an environment that never ends is named by function and line, and what is around it goes on."""

from __future__ import annotations

import asyncio
import json
import math
import os
import queue
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env import interrupts, loop_guard
from forge_env.cli.main import main
from forge_env.concurrency import result_of, start_in_thread
from forge_env.environment.host import get_host
from forge_env.environment.optional import demonstrate, played_gold
from forge_env.errors import EnvironmentBugError, InfrastructureError, environment_code
from forge_env.loop_guard import LoopGuard
from forge_env.rollout import episode
from forge_env.rollout.episode import EpisodeLimits, Retry, run_episode
from forge_env.rollout.scripted import FunctionPolicy, ReplayPolicy
from forge_env.run import preflight
from forge_env.tools import schema
from tests.forge_env.serve.serving import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_guard, "BEAT_S", 0.02)
    schema._REPORTED.clear()


def spin() -> None:
    while True:
        try:
            sum(range(100))
        except Exception:  # noqa: BLE001 - as authors write
            pass


async def wait() -> None:
    await asyncio.Event().wait()


class Endless(fe.ToolEnvironment):
    """Stands still where it is told to."""

    where = ""

    def __init__(self, config: Any = None, **context: Any) -> None:
        self.rubric = fe.Rubric([self.quick, self.judged] if "together" in self.where else self.judged)
        super().__init__(config, **context)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="?", gold="x")

    async def setup(self, task: fe.Task) -> None:
        await self.perhaps("setup")

    async def respond(self, message: fe.Message) -> list[fe.Message]:
        await self.perhaps("respond")
        return []

    def is_final(self, message: fe.Message) -> bool:
        return not message.tool_calls and not self.where.startswith("respond")

    async def quick(self) -> float:
        return 1.0

    async def judged(self) -> float:
        await self.perhaps("reward")
        return 1.0

    @fe.tool
    async def call(self) -> str:
        """Call."""
        await self.perhaps("tool")
        return "said"

    @fe.tool
    def work(self) -> str:
        """Work in a thread."""
        if self.where == "thread":
            stop = STOPS[-1]
            while not stop:
                pass
        return "done"

    async def perhaps(self, place: str) -> None:
        if self.where.startswith(f"{place}, plain"):
            spin()
        if self.where.startswith(f"{place}, async"):
            await wait()


STOPS: list[list[bool]] = [[]]
"""Of each test: threads that miss the end of theirs, which is short, would take the next one's time."""


def endless(where: str, **options: Any) -> Endless:
    cls = type("Endless", (Endless,), {"where": where, "__module__": __name__})
    made = cls(cls.config_class(**{"code_timeout_s": 0.3, **options}))
    assert isinstance(made, Endless)
    return made


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("setup, plain", "Endless.setup blocked all other work for 0.3 s, in spin"),
        ("setup, async", "Endless.reset has not ended after 0.3 s on task 'train-0': it is in Endless.setup, in wait"),
        ("reward, plain", "reward function 'judged' blocked all other work for 0.3 s, in spin"),
        ("reward, async", "Endless.step has not ended after 0.3 s on task 'train-0': it is in reward function"),
        ("reward, async, together", "on task 'train-0': it is in reward function 'judged', in wait"),
        ("respond, plain", "Endless.respond blocked all other work for 0.3 s, in spin"),
        ("respond, async", "it is in Endless.respond, in wait"),
        ("tool, plain", "tool 'call' blocked all other work for 0.3 s, in spin"),
    ],
)
async def test_it_is_named_by_function_and_line(where: str, what: str) -> None:
    policy = ReplayPolicy([fe.call_tool("call"), "x"])
    with LoopGuard(60.0, 0.0, print), pytest.raises(EnvironmentBugError) as caught:
        await run_episode(lambda: endless(where), policy, seed=0)
    assert what in str(caught.value)
    assert re.search(r"in (spin|wait|perhaps) \(.*test_endless\.py:\d+\)", str(caught.value))
    assert "train-0" not in caught.value.place, "the same place on another task is the same bug"
    assert caught.value.place


async def test_an_agent_that_never_ends_uses_up_its_time() -> None:
    agent = FunctionPolicy(lambda messages, tools: spin())
    with LoopGuard(60.0, 0.0, print):
        played = await run_episode(lambda: endless(""), agent, seed=0, limits=EpisodeLimits(wall_s=0.3))
    assert (played.valid, played.truncation, played.turns) == (True, "time", [])


async def test_an_agent_that_is_interrupted_has_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_requested", 1)
    agent, once = FunctionPolicy(lambda messages, tools: spin()), Retry(attempts=0)
    with LoopGuard(60.0, 0.0, print):
        played = await run_episode(lambda: endless(""), agent, seed=0, limits=EpisodeLimits(wall_s=60.0), retry=once)
    assert not played.valid
    assert "the agent was interrupted in spin" in (played.error or "")


def test_an_interrupt_in_a_group_of_exceptions_is_not_a_bug() -> None:
    with pytest.raises(BaseExceptionGroup), environment_code("step"):
        raise BaseExceptionGroup("of a library", [KeyboardInterrupt()])
    with pytest.raises(EnvironmentBugError, match="step raised BaseExceptionGroup"), environment_code("step"):
        raise BaseExceptionGroup("of a library", [SystemExit()])


async def test_an_environment_that_never_ends_an_episode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patient(fe.Environment):
        def task(self, split: str, index: int) -> fe.Task:
            return fe.Task(id="1", prompt="?")

        async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return [], {}

        async def step(self, action: Any) -> Any:
            return [], 0.0, False, False, {}

    monkeypatch.setattr(episode, "MOST_TURNS", 20)
    with pytest.raises(EnvironmentBugError, match=r"Patient.step has not ended the episode after 20 turns"):
        await run_episode(Patient, ReplayPolicy(), seed=0)
    longer = fe.EnvironmentConfig(max_turns=30)
    with pytest.raises(EnvironmentBugError, match="after 30 turns"):
        await run_episode(lambda: Patient(longer), ReplayPolicy(), seed=0)
    played = await run_episode(Patient, ReplayPolicy(), seed=0, limits=EpisodeLimits(max_turns=25))
    assert (played.truncation, len(played.turns)) == ("turns", 25)


async def test_a_task_that_is_never_made_is_named_after_the_authors_limit() -> None:
    class Stuck(Endless):
        def task(self, split: str, index: int) -> fe.Task:
            spin()
            return super().task(split, index)

    env = Stuck(Stuck.config_class(code_timeout_s=0.1))
    with LoopGuard(60.0, 0.0, print), pytest.raises(EnvironmentBugError) as caught:
        fe.resolve_task(env, 3, None)
    assert re.search(r"Stuck\.task blocked .* for 0\.1 s, in spin \(.*:\d+\) on task 'train/3'", str(caught.value))


class Never(Endless):
    """A task that is never made."""

    api_version = 1

    def task(self, split: str, index: int) -> fe.Task:
        spin()
        return super().task(split, index)


@pytest.mark.parametrize(
    "words",
    [["info"], ["play"], ["validate"], ["eval", "--model", "gold"], ["train", "grpo/math_cpu"]],
    ids=lambda words: words[0],
)
def test_a_command_names_it_before_its_event_loop_runs(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, options = f"{__name__}:Never", ["--code_timeout_s", "0.1"]
    if words[0] == "train":
        monkeypatch.setattr(preflight, "check_memory", lambda config: None)
        words, options = [*words, f"environment.name={name}"], ["environment.options={code_timeout_s: 0.1}"]
    else:
        words = [words[0], name, *words[1:]]
    assert main([*words, *options]) == 1
    said = capsys.readouterr().err
    assert re.search(r"Never\.task blocked .* for 0\.1 s, in spin \(.*test_endless\.py:\d+\) on task '\w+/0'", said)


@pytest.mark.parametrize(("where", "who"), [("reward, plain", "reward function 'judged'"), ("", "Loud.demonstrate")])
def test_a_demonstration_that_never_ends_is_named(where: str, who: str) -> None:
    """What plays one by default runs in a thread of its own."""

    class Loud(Endless):
        def demonstrate(self, task: fe.Task, rng: random.Random) -> list[fe.Message] | None:
            if not where:
                spin()
            return played_gold(self, task, rng)

    get_host()  # loading what it needs is not in the way
    env = type("Loud", (Loud,), {"where": where})(Loud.config_class(code_timeout_s=0.1))
    task = fe.resolve_task(env, 0, None)
    with LoopGuard(math.inf, 0.0, print), pytest.raises(EnvironmentBugError) as caught:
        demonstrate(env, task, random.Random(0))
    assert re.search(rf"{who} blocked .* for 0\.1 s, in spin \(.*test_endless\.py:\d+\)", str(caught.value))


@pytest.mark.parametrize("where", ["setup, plain", "reward, plain", "respond, plain", "tool, plain"])
def test_it_is_named_too_where_the_loop_runs_in_another_thread(where: str) -> None:
    """As in an actor's process."""

    async def play() -> None:
        with LoopGuard(60.0, 0.0, print, code_s=0.1):
            await run_episode(lambda: endless(where), ReplayPolicy([fe.call_tool("call"), "x"]), seed=0)

    with ThreadPoolExecutor(1) as pool, pytest.raises(EnvironmentBugError) as caught:
        pool.submit(asyncio.run, play()).result()
    assert re.search(r"blocked all other work for 0\.1 s, in spin \(.*test_endless\.py:\d+\)", str(caught.value))


def test_what_is_no_environments_code_is_left_alone_in_another_thread() -> None:
    async def hold_up() -> int:
        with LoopGuard(0.1, 0.0, told.put_nowait, code_s=0.05, at_once=True):
            rounds = 0
            while told.empty():  # a few times as long as code of an environment may take
                rounds += 1
            return rounds

    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, hold_up()).result() > 0


@pytest.mark.parametrize(("where", "tool"), [("tool, async", "call"), ("thread", "work")])
async def test_a_tool_is_given_up_and_named_once(where: str, tool: str, caplog: pytest.LogCaptureFixture) -> None:
    STOPS.append([])
    policy = ReplayPolicy([fe.call_tool(tool), "x"])
    for _ in range(2):
        trajectory = await run_episode(lambda: endless(where, tool_timeout_s=0.2), policy, seed=0)
        assert trajectory.turns[1].observation[0].content == f"Error: {tool} timed out after 0.2 s"
        assert trajectory.reward == 1.0
    STOPS[-1].append(True)
    (said,) = [record.getMessage() for record in caplog.records if "timed out" in record.getMessage()]
    assert re.fullmatch(
        rf"tool '{tool}' timed out after 0\.2 s: it was in (wait|work) \(.*test_endless\.py:\d+\)", said
    )


async def test_a_tool_that_never_ends_is_broken_off_when_its_episode_is_over() -> None:
    made: list[Endless] = []

    class Spinning(Endless):
        @fe.tool
        def work(self) -> str:
            """Work in a thread, and catch what an author catches."""
            spin()
            return "done"

    def make() -> Endless:
        made.append(Spinning(Spinning.config_class(tool_timeout_s=0.1)))
        return made[-1]

    trajectory = await run_episode(make, ReplayPolicy([fe.call_tool("work"), "x"]), seed=0)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    (env,) = made
    await until(lambda: env.reusable)
    assert [frame for frame in sys._current_frames().values() if frame.f_code is spin.__code__] == []


async def test_what_is_broken_off_as_it_ends_harms_no_other_call() -> None:
    for number in range(300):
        thread = start_in_thread(lambda: sum(range(10 * number)))  # noqa: B023
        await until(lambda: thread.ident is not None)  # noqa: B023
        thread.break_off()
        assert await result_of(start_in_thread(lambda: number)) == number  # noqa: B023
        assert await asyncio.wrap_future(thread)


async def test_tools_have_limits_of_their_own() -> None:
    class Slow(Endless):
        @fe.tool
        async def slow(self) -> str:
            """Take a while."""
            await asyncio.sleep(0.2)
            return "done"

    policy = ReplayPolicy([fe.call_tool("slow"), "x"])
    trajectory = await run_episode(lambda: Slow(Slow.config_class(code_timeout_s=0.1)), policy, seed=0)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)


async def test_who_is_asked_to_end_waits_once_for_a_tool_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Endless):
        where = "thread"

        @fe.tool(timeout_s=3600)
        def patient(self) -> str:
            """Take an hour if need be."""
            return "done"

    STOPS.append([])
    monkeypatch.setattr("forge_env.tools.calls.requested", lambda: True)
    policy = ReplayPolicy([fe.call_tool("work"), fe.call_tool("patient"), fe.call_tool("patient"), "x"])
    async with asyncio.timeout(60):
        trajectory = await run_episode(lambda: Stuck(Stuck.config_class(tool_timeout_s=0.1)), policy, seed=0)
    STOPS[-1].append(True)
    answers = [turn.observation[0].content for turn in trajectory.turns[1:]]
    assert answers == [
        "Error: work timed out after 0.1 s",
        *["Error: patient can't run: a call that timed out is still running"] * 2,
    ]


async def test_a_reset_that_a_limit_of_the_evaluation_ends_is_named_as_well() -> None:
    trajectory = await run_episode(
        lambda: endless("setup, async", code_timeout_s=60.0),
        ReplayPolicy(),
        seed=0,
        limits=EpisodeLimits(wall_s=0.1),
        retry=Retry(attempts=0),
    )
    assert not trajectory.valid
    assert trajectory.error.startswith(
        f"{InfrastructureError.__name__}: reset did not end within 0.1 s: it was in Endless"
    )


PROGRAM = """
import forge_env as fe

class Stuck(fe.SingleTurnEnvironment):
    api_version = 1
    def num_tasks(self, split): return 4
    def task(self, split, index):
        return fe.Task(id=f"{split}-{index}", split=split, prompt=str(index), gold=str(index))
    def reward(self, task, answer):
        if task.prompt == "1":
            print("endless", flush=True)
            while True:
                pass
        return float(answer == task.gold)
"""


@pytest.fixture
def stuck(tmp_path: Path) -> Path:
    (tmp_path / "stuck.py").write_text(PROGRAM)
    return tmp_path


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "forge_env", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_an_evaluation_goes_on_with_the_other_samples(stuck: Path) -> None:
    words = ["eval", "stuck:Stuck", "--model", "gold", "--out", "out", "--code_timeout_s", "1"]
    ended = command(stuck, *words)
    ended.communicate(timeout=60)
    summary = json.loads((stuck / "out" / "summary.json").read_text())
    (environment,) = summary["environments"].values()
    assert environment["samples"] == 3
    log = "".join(path.read_text() for path in (stuck / "out").glob("*.log"))
    assert "reward function 'reward' blocked all other work for 1 s, in reward" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["validate", "stuck:Stuck"], ["eval", "stuck:Stuck", "--model", "gold", "--out", "o"]]
)
def test_one_interruption_ends_it(stuck: Path, words: list[str]) -> None:
    running = command(stuck, *words)
    while "endless" not in running.stdout.readline():
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)
    assert running.returncode in (1, 130)
