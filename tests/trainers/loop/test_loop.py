"""Parts of the loop on its edges: what counts as a score, what a resumed run has, what is saved twice."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("safetensors")  # of the training stack; torch would cost every worker seconds


import forge_env as fe
from forge_env.config import RunConfig, load_config
from forge_env.errors import ForgeError
from forge_env.run import Run, RunFolder
from forge_env.run.outcome import read_summary
from forge_env.tasks.curriculum import Curriculum
from forge_env.trajectory import Trajectory
from tests.trainers.loop.stand_ins import add_weights
from trainers.algorithms.grpo import train
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings
from trainers.loop.checkpoints import MANIFEST, Checkpoints, Saved
from trainers.loop.evaluation import Evaluator
from trainers.loop.healing import Healing
from trainers.loop.prepare import _cached, resumed_model
from trainers.loop.record import Record
from trainers.loop.stack import RoleDiedError, prepare_controller, tell_of_rdma, unless_stopped
from trainers.loop.system import Publisher, System
from trainers.model.chat import Chat, FolderTokenizer
from trainers.model.tiny import build_tiny_folder, write_tokenizer
from trainers.rollout.local import InTurn, check_prompts
from trainers.rollout.types import Group, GroupReport, Totals, why_nothing


@pytest.fixture
def config() -> RunConfig:
    return load_config("coding_rlvr", ["grpo.steps=4"])


@pytest.fixture
def run(config: RunConfig, tmp_path: Path) -> Run:
    return Run(config, RunFolder(tmp_path / "run"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built model without weights; its tokenizer is trained on the environment, a little of it."""
    model = load_config("coding_rlvr").model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainers.model.tiny.write_tokenizer", partial(write_tokenizer, samples=200))
        return build_tiny_folder(model, fe.make("coding_rlvr"), 0, tmp_path_factory.mktemp("built") / "tiny")


class Lost:
    """Rollouts of which infrastructure spoils every one."""

    async def evaluate(
        self, split: str, count: int, kind: str, add: Callable[[Trajectory], object], held: object
    ) -> None:
        for n in range(count):
            add(Trajectory(id=str(n), environment="", task_id="", valid=False, error="no sandbox"))


class Holding:
    """Generators whose weights can be held."""

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(version=0, key=(0, 0))


async def test_a_score_of_nothing_is_an_error_and_no_zero(run: Run) -> None:
    with pytest.raises(ForgeError, match=r"no episode of the evaluation on eval could be played.*no sandbox"):
        await Evaluator(run, Lost(), Holding()).evaluate(0, "eval", 3)
    assert run.state.evaluations == []


def test_why_a_group_came_to_nothing() -> None:
    def episode(**fields: Any) -> Trajectory:
        return Trajectory(id="", environment="", task_id="", **fields)

    assert "no sandbox" in why_nothing(Group([episode(valid=False, error="no sandbox")]))[0]
    assert "model.max_length" in why_nothing(Group([episode(error="lost once, then played")]))[1]
    assert "grpo.group_timeout_s" in why_nothing(Group([]))[1]


async def test_work_ends_when_the_run_is_asked_to_stop(run: Run) -> None:
    ended: list[str] = []

    async def forever() -> None:
        run.request_stop()
        try:
            await run_forever.wait()
        finally:
            ended.append("cleaned up")

    run_forever = asyncio.Event()

    async def quick() -> int:
        return 3

    assert await unless_stopped(run, quick()) == 3
    await unless_stopped(run, forever())
    assert ended == ["cleaned up"]


def checkpointed(config: RunConfig, root: Path) -> Run:
    """A run to be resumed, with one checkpoint."""
    folder = RunFolder(root / "run")
    model = folder.checkpoints / "step-000002" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    (model.parent / MANIFEST).write_text("{}")
    return Run(config, folder, resume=True)


def test_a_resumed_run_starts_from_its_checkpoint_and_not_from_a_warm_up(config: RunConfig, tmp_path: Path) -> None:
    run = checkpointed(config, tmp_path)
    model = resumed_model(run)
    shutil.rmtree(run.folder.checkpoints / "step-000002")  # as newer ones take its place
    assert (model / "model.safetensors").read_bytes() == b"weights"
    assert Checkpoints(run).step == 0


async def test_resumed_run_stopped_early_says_what_is_saved(config: RunConfig, tmp_path: Path) -> None:
    async def asked_meanwhile() -> None:
        run.request_stop()
        await asyncio.Event().wait()

    run = checkpointed(config, tmp_path)
    system = System.__new__(System)
    system.run, system.config, system.record = run, config, Record(run, None, None, [])
    system._stack = SimpleNamespace(unless_one_dies=lambda work: work)
    system.healing = Healing(system, system._stack)
    system.configure = asked_meanwhile
    async with asyncio.timeout(10):
        await system._run_to_end()
    assert run.state.saved == 2


def test_the_reference_of_the_start_needs_the_model_of_the_start(tmp_path: Path) -> None:
    config = load_config("coding_rlvr", ["grpo.reference.source=initial"])
    assert resumed_model(checkpointed(config, tmp_path)) is None


def test_a_damaged_model_in_the_cache_is_removed_and_told(run: Run, tiny: Path, tmp_path: Path) -> None:
    warm = shutil.copytree(tiny, tmp_path / "warm")
    assert _cached(run, warm) is None
    assert warm.exists()
    add_weights(warm)
    assert _cached(run, warm) == warm
    (warm / "model.safetensors").write_bytes(b"\x10")
    assert _cached(run, warm) is None
    assert not warm.exists()
    assert any("being rebuilt" in warning for warning in run.state.warnings)


@pytest.mark.parametrize(("value", "told"), [("1", 1), ("true", 1), ("0", 0), (None, 0)])
def test_rdma_request_is_explained(run: Run, monkeypatch: pytest.MonkeyPatch, value: str | None, told: int) -> None:
    for name in ("TORCHSTORE_RDMA_ENABLED", "TORCHSTORE_USE_RDMA"):
        monkeypatch.setenv(name, "")  # what is set meanwhile is undone
        monkeypatch.delenv(name)
    if value is not None:
        monkeypatch.setenv("TORCHSTORE_USE_RDMA", value)
    prepare_controller()
    assert os.environ.get("TORCHSTORE_RDMA_ENABLED") == (None if value is None else str(told))
    tell_of_rdma(run)
    assert len(run.state.warnings) == told
    assert all("over TCP between hosts" in warning for warning in run.state.warnings)


async def test_a_finished_run_is_not_started_again(config: RunConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.checkpoints / "step-000004").mkdir(parents=True)
    (folder.checkpoints / "step-000004" / MANIFEST).write_text("{}")
    folder.metrics.write_text(json.dumps({"step": 4, "eval/eval/score": 0.8}) + "\n")
    run = Run(config, folder, resume=True)
    await train(run)
    assert [stage.name for stage in run.state.stages] == []


async def test_a_run_killed_after_its_last_checkpoint_keeps_the_counts_of_all_episodes(run: Run) -> None:
    async def saved(*_: object, **__: object) -> None:
        pass

    run.folder.create()
    system = System.__new__(System)
    rollouts = SimpleNamespace(totals=Totals(episodes=54))
    system.run, system.step, system.account = run, 6, run.account("trainer", "start")
    system.trainer = None
    system.record = Record(run, None, rollouts, [])
    healing = Healing(system, None)
    healing.at_rest = Saved(6, {}, {})
    healing.checkpoints = SimpleNamespace(settled=saved, save=saved)
    await healing.save()
    assert read_summary(run.folder.summary)["episodes"] == 54
    run.folder.release()


async def test_a_prompt_that_fills_the_model_is_refused_before_anything_starts(tiny: Path) -> None:
    config = load_config("coding_rlvr", ["model.max_length=16"])
    environment = fe.make("coding_rlvr")
    chat = Chat(FolderTokenizer(tiny), "qwen3")
    with pytest.raises(ForgeError, match=r"max_length=16 leaves no room for a reply.* have \d+ to \d+ tokens"):
        await check_prompts(config, environment, chat)
    assert await check_prompts(load_config("coding_rlvr"), environment, chat) is None
    other = Chat.named("chatml", tiny, FolderTokenizer(tiny), thinking=False)
    doubt = await check_prompts(load_config("coding_rlvr"), environment, other)
    assert doubt is not None
    assert "8 of 8 prompts differ from those of the chat template" in doubt


class SlowEvaluator:
    """Remembers what was begun, and ends when it is told to."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.end = asyncio.Event()

    async def evaluate(self, step: int, split: str, count: int) -> None:
        self.begun.append(step)
        await self.end.wait()


def evaluating(run: Run, evaluator: SlowEvaluator, tasks: asyncio.TaskGroup) -> System:
    """As much of a system as an evaluation beside training needs."""
    system = System.__new__(System)
    system.run, system.config, system.step, system._evaluation = run, run.config, 10, None
    system.evaluator = evaluator
    system._publisher = Publisher(None, None, None, tasks, None)
    system.healing = Healing(system, None)
    system._tasks = tasks
    return system


async def test_one_evaluation_at_a_time(run: Run) -> None:
    evaluator = SlowEvaluator()
    async with asyncio.TaskGroup() as group:
        system = evaluating(run, evaluator, group)
        for step in (10, 20):
            system.step = step
            system._evaluate_beside()
            for _ in range(5):
                await asyncio.sleep(0)
        evaluator.end.set()
    assert evaluator.begun == [10]
    assert any("evaluation.every" in text for text in run.state.warnings)


async def test_who_asks_a_run_to_stop_waits_for_no_evaluation_beside_training(run: Run) -> None:
    """The weights that it holds would keep those of the last step from arriving, and so the run from its end."""
    evaluator = SlowEvaluator()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        evaluating(run, evaluator, group)._evaluate_beside()
        for _ in range(5):
            await asyncio.sleep(0)
        assert evaluator.begun == [10]
        run.request_stop()


async def test_a_run_that_was_asked_to_stop_waits_for_no_weights_to_arrive(run: Run) -> None:
    """Where all generators were on a host that is lost, they would arrive when that is back."""
    pushed: list[int] = []

    class Trainer:
        async def begin_push(self, version: int) -> Any:
            pushed.append(version)
            return readable()

        async def update_reference(self, version: int, published: None) -> None:
            pass

    class Contract:
        async def weights_sent(self) -> None:
            pass

    class Generators:
        async def update_weights(self, version: int, published: None) -> None:
            await asyncio.Event().wait()

    async def readable() -> tuple[None, dict[str, float]]:
        return None, {}

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        system = evaluating(run, SlowEvaluator(), group)
        system.account = run.account("trainer", "start")
        publisher = Publisher(Trainer(), Generators(), None, group, Contract())
        system._publisher = publisher
        await system.publish(1)
        asyncio.get_running_loop().call_soon(run.request_stop)
        await system.publish(2)
        await system._settled()
        publisher.close()
    assert pushed == [1]


async def test_a_checkpoint_knows_the_task_of_every_position_that_its_buffer_has_handed_out(run: Run) -> None:
    """Rollouts go on while it is made; a position that was handed out meanwhile gets the same task after a resume."""
    environment = fe.make("coding_rlvr")
    order = Curriculum(lambda index: environment.task("train", index), None)

    class Buffer(LocalReplayBuffer[Any]):
        async def state_dict(self, trained: int = 0) -> dict[str, Any]:
            order[(await self.admit()).index]
            state = await super().state_dict(trained)
            order[(await self.admit()).index]
            system.results[0] = system.results[1] = 1.0  # they end while the state is under way
            return state

    system = System.__new__(System)
    system.run, system.step, system.results = run, 1, {}
    system.buffer = Buffer(BufferSettings(2, 1))
    asked: list[tuple[list[bool], int]] = []

    def totals_of(known: Callable[[int], bool], first_open: int) -> Totals:
        asked.append(([known(position) for position in range(3)], first_open))
        return Totals(episodes=7)

    system.rollouts = SimpleNamespace(order=order, set_aside=set(), state_dict=dict, totals_of=totals_of)
    system.under_way = set()
    system.lost_in_a_row, system.dropped_in_a_row = 3, 4
    system.algorithm = SimpleNamespace(state_dict=dict)
    state = await Healing(system, None).collect()
    assert [index for index, _ in state.buffer["rolling"]] == [0]
    assert {"0", "1"} >= set(state.state["order"]["assigned"]) >= {"0"}
    assert state.state["results"] == [], "groups that are rolled out again would count twice"
    assert asked == [([False, False, False], 0)]
    assert state.state["totals"]["episodes"] == 7
    assert state.state["in_a_row"] == [3, 4]


async def test_a_replaced_group_is_told_with_its_cause_and_what_to_do(run: Run) -> None:
    """Once for each kind of cause, however the texts of a kind differ."""
    system = System.__new__(System)
    system.run, system.buffer = run, LocalReplayBuffer(BufferSettings(8, 1))
    system.lost_in_a_row, system._lost_warnings = 0, {}
    late = why_nothing(Group([]))
    for why in (
        late,
        ("SandboxError: box 1 is gone", "see run.log"),
        ("SandboxError: box 2\nis gone", "see run.log"),
        late,
    ):
        await system._replace(await system.buffer.admit(), GroupReport(why_lost=why))
    said = "no episode of a group can be trained on, so the group was replaced"
    assert run.state.warnings == {
        f"{said}: no episode finished in time; raise grpo.group_timeout_s, or lower grpo.max_tokens_per_turn": 2,
        f"{said}: SandboxError: box 1 is gone; see run.log": 2,
    }


async def test_groups_pass_in_the_order_of_their_admission() -> None:
    turns, passed = InTurn(True), list[int]()

    async def group(index: int, ended: asyncio.Event, kept: bool) -> None:
        turns.begin(index)
        await ended.wait()
        if kept:
            await turns.wait(index)
            passed.append(index)
        turns.done(index)

    ends = [asyncio.Event() for _ in range(5)]
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for index in range(5):
            tasks.create_task(group(index, ends[index], kept=index != 1))
        for index in (4, 2, 3, 0, 1):
            for _ in range(5):
                await asyncio.sleep(0)
            ends[index].set()
    assert passed == [0, 2, 3, 4]
    await InTurn(False).wait(7)


@pytest.mark.parametrize("role", ["trainer", "reference"])
async def test_what_is_set_back_only_in_part_is_never_saved(run: Run, role: str) -> None:
    """A checkpoint of a step holds the weights of that step: those of a trainer that has just begun again don't."""

    async def at_once(*args: Any) -> None:
        pass

    async def fail() -> None:
        raise RoleDiedError(role, "killed")

    async def interrupted(trainer: Any) -> None:
        raise asyncio.CancelledError

    saved: list[int] = []

    async def save(*, patient: bool) -> None:
        saved.append(system.step)

    system = System.__new__(System)
    system.run, system.step, system.record = run, 14, Record(run, None, None, [])
    system.configure = at_once
    stack: Any = SimpleNamespace(restart=at_once, unless_one_dies=lambda work: work)
    healing = Healing(system, stack)
    healing.unsettled = role == "trainer"
    healing.collect, healing.save = at_once, save
    system.trainer = SimpleNamespace(reference=None)
    system.rollouts = SimpleNamespace(reconnect=at_once)
    system.buffer = None
    healing.checkpoints = SimpleNamespace(step=10, settled=at_once, verify=lambda: None, restore=interrupted)
    with pytest.raises(asyncio.CancelledError):
        await healing.run(fail)
    assert saved == ([] if role == "trainer" else [14]), "only before anything is set back"


@pytest.mark.parametrize("asked", ["before the death", "while it is started again"])
async def test_a_run_that_was_asked_to_stop_waits_for_nobody_who_died(run: Run, asked: str) -> None:
    """Starting it again may wait for a host that is lost."""

    async def at_once() -> None:
        pass

    async def die() -> None:
        if asked == "before the death":
            run.request_stop()
        raise RoleDiedError("trainer", "killed")

    async def restart(role: str) -> None:
        restarted.append(role)
        run.request_stop()
        await asyncio.Event().wait()

    restarted: list[str] = []
    system = System.__new__(System)
    system.run, system.step = run, 2
    stack: Any = SimpleNamespace(restart=restart, unless_one_dies=lambda work: work)
    healing = Healing(system, stack)
    healing.unsettled = True
    healing.collect = at_once
    healing.checkpoints = SimpleNamespace(step=1, settled=at_once)
    async with asyncio.timeout(10):
        await healing.run(die)
    assert restarted == ([] if asked == "before the death" else ["trainer"])
    assert any("trainer died" in warning for warning in run.state.warnings)
