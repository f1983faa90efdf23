"""Rolling out groups: in the recipe's order, which learns from it; what bugs in the environment cost, and deaths."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.config import RunConfig
from forge_env.errors import ForgeError
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.run import Run, RunFolder
from forge_env.run.trajectories import TrajectoryFiles
from forge_env.sandbox import phase
from forge_env.tasks.curriculum import Curriculum
from forge_env.trajectory import read_trajectories

# one of the training packages; torch itself would cost every worker seconds
pytest.importorskip("safetensors", reason="NOT RUN: the training stack is not installed")
from tests.trainers.rollout.played_here import Here, rollouts_here
from trainers.actors.remote import ActorDiedError, FurtherActorDiedError, result
from trainers.algorithms.grpo import Weighing
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.packed import PackedGroup
from trainers.buffer.types import BufferSettings, Outcome, Ticket
from trainers.rollout.rollouts import Rollouts
from trainers.rollout.types import Fate, Group, GroupReport, Links, Preparation, Totals


class Levels(fe.SingleTurnEnvironment):
    """Level 1 is always solved, level 3 never, level 2 by every other attempt."""

    def task(self, split: str, index: int) -> fe.Task:
        level = 1 + index % 3
        return fe.Task(id=f"{split}-{index}", split=split, prompt=str(level), difficulty=level)

    def num_tasks(self, split: str) -> int | None:
        return 30

    def reward(self, task: fe.Task, answer: str) -> float:
        return float(answer)


class Attempts(Policy, PolicySession):
    def __init__(self) -> None:
        self.attempts = 0

    def session(self, tools: list[fe.ToolSpec], *, seed: int | None = None) -> Attempts:
        return self

    async def reply(self, observation: list[fe.Message]) -> Reply:
        self.attempts += 1
        answer = {"1": "1", "2": str(self.attempts % 2), "3": "0"}[observation[0].content]
        message = fe.Message(role="assistant", content=answer)
        return Reply(message, prompt_ids=[1], token_ids=[2], logprobs=[-1.0], versions=[0])


class Played:
    """The rollouts of a run whose buffer always has room."""

    def __init__(self, run: Run, rollouts: Rollouts, crew: Here, buffer: LocalReplayBuffer[Any]) -> None:
        self.run, self.rollouts, self.crew, self.buffer = run, rollouts, crew, buffer

    async def group(self, position: int) -> GroupReport:
        while (ticket := await self.buffer.admit()).index != position:
            pass
        return await self.rollouts.group(ticket)

    async def close(self) -> list[fe.Trajectory]:
        """What was recorded of the training rollouts, in the order of positions."""
        await self.rollouts.close()
        file = self.run.folder.trajectories / "train.jsonl"
        episodes = list(read_trajectories(file)) if file.exists() else []
        return sorted(episodes, key=lambda episode: int(episode.id.replace("group ", "train-").split("-")[1]))


Make = Callable[..., Awaitable[Played]]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    async def make(
        environment: type[fe.Environment] = Levels,
        limit: float = 0.2,
        count: int = 1,
        preparation: type[Preparation] = Weighing,
        policy: Policy | None = None,
        generator: dict[str, Any] | None = None,
        grpo: dict[str, Any] | None = None,
        **tasks: Any,
    ) -> Played:
        section = {"name": "levels", "max_bug_rate": limit}
        recipe = {"environment": section, "grpo": {"group_size": 4, **(grpo or {})}, "tasks": tasks, "seed": 3}
        recipe |= {"rollouts": {"workers": count}, "generator": generator or {}}
        run = Run(RunConfig.model_validate(recipe), RunFolder(tmp_path / "run"))
        run.folder.root.mkdir(exist_ok=True)
        buffer: LocalReplayBuffer[Any] = LocalReplayBuffer(BufferSettings(1000, 0))
        rollouts, crew = await rollouts_here(
            run, environment, policy or Attempts(), buffer, count=count, preparation=preparation
        )
        return Played(run, rollouts, crew, buffer)

    return make


async def levels(played: Played, positions: range) -> Counter[int]:
    for position in positions:
        await played.group(position)
    groups = {episode.id.split("-")[1]: episode.difficulty for episode in await played.close()}
    return Counter(groups.values())


@pytest.mark.parametrize("count", [1, 3])
async def test_shuffled_plays_every_task_once_an_epoch(made: Make, count: int) -> None:
    played = await made(count=count)
    assert await levels(played, range(30)) == {1: 10, 2: 10, 3: 10}
    assert [number for number, _, _ in played.crew.calls] == [position % count for position in range(30)]


async def test_sequential_plays_in_order(made: Make) -> None:
    in_order = await made(order="sequential")
    for position in range(3):
        await in_order.group(position)
    assert [episode.task_id for episode in await in_order.close()][::4] == ["train-0", "train-1", "train-2"]


async def test_a_curriculum_follows_success_and_goes_on_after_a_resume(made: Make) -> None:
    first = await made(order="curriculum", count=2)
    counts = await levels(first, range(60))
    assert counts[2] > counts[1] > 0
    assert counts[2] > counts[3] > 0
    again, order = (await made(order="curriculum")).rollouts.order, first.rollouts.order
    again.load_state_dict(order.state_dict(first=60))
    assert isinstance(order, Curriculum)
    assert isinstance(again, Curriculum)
    assert again.shares() == order.shares()
    assert [again[position] for position in range(60, 70)] == [order[position] for position in range(60, 70)]


class Judged(Levels):
    def reward(self, task: fe.Task, answer: str) -> float:
        with phase("tests"):  # as an engine tells it
            return super().reward(task, answer)


async def test_what_the_first_episode_of_a_group_does_with_sandboxes_is_on_the_timeline(made: Make) -> None:
    played = await made(Judged)
    await played.group(0)
    await played.rollouts.look()
    await played.close()
    events = json.loads(played.run.folder.timeline.read_text().rstrip("]\n") + "]")
    told = [(event["id"], event["name"], event["ph"]) for event in events if event.get("cat") == "rollouts0: sandboxes"]
    assert told == [("train-0-0", "tests", "b"), ("train-0-0", "tests", "e")]


class Ranked(Levels):
    rubric = fe.Rubric(Levels.reward, group=[lambda rewards: [float(rank) for rank in range(len(rewards))]])


async def test_a_group_is_scored_as_a_whole(made: Make) -> None:
    played = await made(Ranked, order="sequential")
    await played.group(0)
    assert [episode.reward for episode in await played.close()] == [1.0, 2.0, 3.0, 4.0]


def refuse_five(task: fe.Task, answer: str) -> float:
    if task.id == "train-5":
        raise ZeroDivisionError("nobody can score this")
    return float(answer)


class OneBad(Levels):
    """The reward function raises on one task."""

    rubric = fe.Rubric(refuse_five)


class NoFive(Levels):
    """One task can't be made."""

    def task(self, split: str, index: int) -> fe.Task:
        if index == 5:
            raise KeyError("five")
        return super().task(split, index)


class BadTogether(Levels):
    """A group can't be scored as a whole."""

    async def score_group(self, task: fe.Task, trajectories: Any) -> None:
        raise RuntimeError("together")


@pytest.mark.parametrize("count", [1, 4])
async def test_a_bug_of_the_environment_costs_its_episode_and_sets_its_task_aside(made: Make, count: int) -> None:
    """Another worker than the one that met it too: position 35 is not that of position 5."""
    played = await made(OneBad, order="sequential", count=count)
    reports = [await played.group(position) for position in range(60)]
    assert [position for position, report in enumerate(reports) if report.fate == Fate.LOST] == [5, 35]
    assert all(report.fate == Fate.KEPT for position, report in enumerate(reports) if position not in (5, 35))
    assert "nobody can score this" in str(reports[5].bug)
    assert "test_rollouts.py" in reports[5].why_lost[0]  # file and line
    assert "is excluded" in reports[35].why_lost[0]
    assert (reports[5].totals.episodes, reports[35].totals.episodes) == (4, 1)  # not played again
    assert (reports[5].totals.episodes_bugs, reports[5].totals.episodes_invalid) == (4, 0)
    (told,) = [text for text in played.run.state.warnings if "ZeroDivisionError" in text]  # of four episodes
    assert "a bug in the environment" in told
    assert "train-5" in told
    assert played.rollouts.set_aside == {"train-5"}
    assert (await played.buffer.stats()).ready == 58


@pytest.mark.parametrize(("environment", "said"), [(NoFive, "KeyError"), (BadTogether, "together")])
async def test_bug_beside_an_episode_costs_its_group(environment: type[fe.Environment], said: str, made: Make) -> None:
    report = await (await made(environment, order="sequential")).group(5)
    assert report.fate == Fate.LOST
    assert said in report.why_lost[0]


async def test_too_many_bugs_end_the_run_with_the_diagnosis(made: Make) -> None:
    class Bad(Levels):
        rubric = fe.Rubric(lambda task, answer: 1 / 0)

    played = await made(Bad, order="sequential", count=2)
    for position in range(19):
        await played.group(position)
    with pytest.raises(ForgeError, match=r"failed on 100% of the last 20 tasks.*ZeroDivisionError"):
        await played.group(19)


async def held_out(played: Played, count: int, kind: str = "eval-00000") -> list[fe.Trajectory]:
    """Episodes of held-out tasks, in the order of the tasks."""
    episodes: list[fe.Trajectory] = []
    await played.rollouts.evaluate("eval", count, kind, episodes.append)
    return sorted(episodes, key=lambda episode: int(episode.id.removeprefix("eval-")))


@pytest.mark.parametrize("count", [1, 4])
async def test_held_out_tasks_with_a_bug_are_left_out(made: Make, count: int) -> None:
    played = await made(NoFive, count=count)
    episodes = await held_out(played, 30, "eval-00007")
    assert [episode.valid for episode in episodes].count(False) == 1
    tasks = [f"eval-{index}" for index in range(30)]
    assert [episode.id for episode in episodes] == tasks
    assert not any(episode.turns for episode in episodes), "messages stay with the workers"
    await played.rollouts.close()
    recorded = list(read_trajectories(played.run.folder.trajectories / "eval-00007.jsonl"))
    assert sorted(episode.id for episode in recorded) == sorted(tasks)
    assert sum(len(episode.turns) for episode in recorded) == 29


class Crowd(Attempts):
    """Counts how many ask at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.asking = self.most = 0

    async def reply(self, observation: list[fe.Message]) -> Reply:
        self.asking += 1
        self.most = max(self.most, self.asking)
        for _ in range(5):
            await asyncio.sleep(0)
        self.asking -= 1
        return await super().reply(observation)


@pytest.mark.parametrize("count", [1, 2])
async def test_of_many_held_out_tasks_as_many_are_under_way_as_a_generator_decodes(made: Make, count: int) -> None:
    crowd = Crowd()
    played = await made(policy=crowd, count=count, generator={"max_num_seqs": 5})
    episodes = await held_out(played, 30)
    assert [episode.id for episode in episodes] == [f"eval-{index}" for index in range(30)]
    assert crowd.most == 5


async def test_memory_of_a_hundred_million_held_out_tasks(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Each had a task of the event loop: 14.5 GB until the kernel ended the run."""

    class Endless(Levels):
        def num_tasks(self, split: str) -> int | None:
            return None if split == "eval" else 30

    policy = Waiting()
    played = await made(Endless, policy=policy, generator={"max_num_seqs": 5})
    before = len(asyncio.all_tasks())
    caplog.set_level("INFO")
    evaluation = asyncio.ensure_future(held_out(played, 100_000_000))
    await policy.asked.wait()
    assert len(asyncio.all_tasks()) - before < 30
    assert len(played.crew.calls) <= 5
    assert "plays 100,000,000 episodes" in caplog.text
    evaluation.cancel()
    await asyncio.gather(evaluation, return_exceptions=True)


# --- workers that die


class Waiting(Attempts):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def reply(self, observation: list[fe.Message]) -> Reply:
        self.asked.set()
        await self.may.wait()
        return await super().reply(observation)


async def test_a_dead_workers_groups_are_played_again_under_their_tickets(made: Make) -> None:
    policy = Waiting()
    played = await made(count=2, policy=policy)
    groups = [asyncio.ensure_future(played.group(position)) for position in range(2)]
    await policy.asked.wait()
    await asyncio.sleep(0)
    played.crew.kill(1)
    policy.may.set()
    assert [report.fate for report in await asyncio.gather(*groups)] == [Fate.KEPT, Fate.KEPT]
    assert [(number, request.ticket.index, request.again) for number, _, request in played.crew.calls] == [
        (0, 0, False),
        (1, 1, False),
        (1, 1, True),
    ]
    stats = await played.buffer.stats()
    assert (stats.ready, stats.rolling, stats.completed) == (2, 0, 2)
    assert played.rollouts.totals.episodes == 8
    assert any("rollout worker 1 died" in text for text in played.run.state.warnings)


async def test_every_group_is_counted_once_however_often_it_is_played(made: Make) -> None:
    """In the same session, or in one that goes on from a checkpoint whose buffer doesn't have it."""
    played = await made(count=1)
    for position in range(4):
        await played.group(position)
    rollouts = played.rollouts
    assert rollouts.totals.episodes == 16
    saved = rollouts.totals_of(lambda position: position != 2, 1)
    assert (saved.episodes, rollouts.totals.episodes) == (12, 16)
    again = Totals(episodes=3, episodes_late=1)
    rollouts._count(2, again)
    assert (rollouts.totals.episodes, rollouts.totals.episodes_late) == (15, 1)


class Deadly(Attempts):
    """Its first question is the last for whoever asks it."""

    crew: Here

    async def reply(self, observation: list[fe.Message]) -> Reply:
        self.crew.kill(0)
        return await asyncio.Event().wait()


async def test_a_group_that_workers_die_of_is_given_up(made: Make) -> None:
    policy = Deadly()
    played = await made(policy=policy)
    policy.crew = played.crew
    report = await played.group(0)
    assert report.fate == Fate.LOST
    assert "4 rollout workers died while group 0 was played" in report.why_lost[0]
    assert (report.totals.episodes, report.totals.episodes_invalid) == (4, 4)
    assert (await played.buffer.stats()).rolling == 1  # to be discarded by whoever asked for it
    with pytest.raises(ActorDiedError):
        await held_out(played, 2)


async def test_recorded_episode_of_a_dead_worker_is_kept(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    played = await made(policy=(policy := Attempts()), generator={"max_num_seqs": 1})
    written, calls = TrajectoryFiles.written, itertools.count(1)

    async def killed_at_the_third(files: TrajectoryFiles) -> None:
        await written(files)
        if next(calls) == 3:
            played.crew.kill(0)

    monkeypatch.setattr(TrajectoryFiles, "written", killed_at_the_third)
    episodes = await held_out(played, 30)
    await played.rollouts.close()
    recorded = list(read_trajectories(played.run.folder.trajectories / "eval-00000.jsonl"))
    assert sorted(episode.id for episode in recorded) == sorted(f"eval-{index}" for index in range(30))
    assert {episode.id: episode.reward for episode in recorded} == {each.id: each.reward for each in episodes}
    assert any(request.again for _, _, request in played.crew.calls)
    assert policy.attempts == 30


async def test_an_evaluation_leaves_its_episodes_once_or_not_at_all(made: Make) -> None:
    """Whatever there was of it: another session, weights of a step that the run has gone back from."""
    played = await made(count=2, policy=(policy := Waiting()))
    folder = played.run.folder.trajectories
    folder.mkdir()
    (folder / "eval-00003.77-1.partial-0-host.jsonl").write_text("of a session that was killed")
    (folder / "eval-00003-0-host.jsonl").write_text("of a host that is gone")
    evaluation = asyncio.ensure_future(held_out(played, 30, "eval-00003"))
    await policy.asked.wait()
    evaluation.cancel()
    await asyncio.gather(evaluation, return_exceptions=True)
    assert [path.name for path in folder.iterdir()] == ["eval-00003-0-host.jsonl"]
    policy.may.set()
    for _ in range(2):
        await held_out(played, 30, "eval-00003")
    await played.rollouts.close()
    assert sorted(path.name for path in folder.iterdir()) == ["eval-00003.index.jsonl", "eval-00003.jsonl"]
    assert len(list(read_trajectories(folder / "eval-00003.jsonl"))) == 30


class Silent(Weighing):
    """Its workers die when a group has arrived in the buffer, and before they can say so."""

    crew: Here

    def state_dict(self) -> dict[str, Any]:
        if not Silent.crew.calls[-1][2].again:
            Silent.crew.kill(0)
        return {}


async def test_a_group_whose_worker_died_after_it_was_added_is_not_added_twice(made: Make) -> None:
    played = await made(preparation=Silent)
    Silent.crew = played.crew
    report = await played.group(0)
    assert report.fate == Fate.KEPT
    assert [request.again for _, _, request in played.crew.calls] == [False, True]
    stats = await played.buffer.stats()
    assert (stats.completed, stats.ready) == (1, 1)


class Counting(Weighing):
    """Remembers how many groups it has seen."""

    groups = 0

    async def __call__(self, group: Group) -> PackedGroup | None:
        self.groups += 1
        return await super().__call__(group)

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.groups = state.get("groups", 0)


async def test_what_a_workers_preparation_remembers_outlives_the_worker_and_the_run(made: Make) -> None:
    played = await made(preparation=Counting, count=2)
    for position in range(5):
        await played.group(position)
    assert played.rollouts.state_dict() == {"0": {"groups": 3}, "1": {"groups": 2}}
    played.crew.kill(0)
    assert (await played.group(6)).state == {"groups": 4}
    again = await made(preparation=Counting, count=3)  # the third begins as the first did
    await again.rollouts.load_state_dict(played.rollouts.state_dict(), {"no such"})
    assert [(await again.group(position)).state["groups"] for position in range(3)] == [5, 3, 5]
    assert again.rollouts.set_aside == {"no such"}


async def test_figures_of_a_worker_go_on_in_its_next_life(made: Make) -> None:
    played = await made()
    for position in range(3):
        await played.group(position)
        await played.rollouts.look()
        assert played.rollouts.episodes_ended == 4 * (position + 1)
        played.crew.kill(0)
    times = played.rollouts.take_times()
    assert set(times) == {"episodes", "rollouts0"}
    assert set(times["rollouts0"]) == {"busy", "wait"}
    assert all(seconds >= 0 for seconds in times["rollouts0"].values())
    assert sum(times["episodes"].values()) > 0


async def test_a_buffer_that_died_gets_the_group_when_it_is_back(made: Make) -> None:
    played = await made()

    class Dead(LocalReplayBuffer[Any]):
        asked = asyncio.Event()

        async def add(self, group: Any, ticket: Ticket | None = None) -> Outcome:
            self.asked.set()
            raise ActorDiedError("its process was killed by signal 9")

    await played.rollouts.connect(Links((), Dead(BufferSettings(1, 0))))
    group = asyncio.ensure_future(played.group(0))
    await Dead.asked.wait()
    await played.rollouts.connect(Links((), played.buffer))
    assert (await group).fate == Fate.KEPT
    assert (await played.buffer.stats()).ready == 1


async def test_a_buffer_that_says_that_another_died_is_not_taken_for_dead(made: Make) -> None:
    """Nobody will take its place, so nobody must wait for that."""
    from monarch.actor import ActorError

    async def told_there() -> Outcome:
        raise ActorError(ActorDiedError("its judge was killed", fix="see its log"))

    class Tells(LocalReplayBuffer[Any]):
        async def add(self, group: Any, ticket: Ticket | None = None) -> Outcome:
            return await result(told_there())

    played = await made()
    await played.rollouts.connect(Links((), Tells(BufferSettings(1, 0))))
    async with asyncio.timeout(10):
        with pytest.raises(FurtherActorDiedError, match=r"its judge was killed \(see its log\)"):
            await played.group(0)
    assert len(played.crew.calls) == 1, "nor is the worker, which passes it on"
