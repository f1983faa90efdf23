"""What stands still, and what is told of it: requests, engines and actors that never answer, on a virtual clock."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("safetensors")  # of the training stack; torch would cost every worker seconds

import forge_env as fe
from forge_env import machine
from forge_env.config import load_config
from forge_env.errors import ForgeError
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.run import Run, RunFolder
from forge_env.run.account import Account
from forge_env.types import Message
from tests.trainers.buffer import virtual_time
from tests.trainers.loop.dry_run import Sums, dry_run
from tests.trainers.loop.stand_ins import STAND_INS, Actors, Generator, TitanTrainer
from trainers.algorithms.parts import ByConversation, GroupMean, LeaveOneOut, TurnReturns, token_advantages
from trainers.buffer.packed import pack
from trainers.generator.pool import PATIENCE_S
from trainers.generator.types import Completion, SamplingOptions
from trainers.loop.status import Status
from trainers.rollout.player import Player
from trainers.rollout.rollouts import MemoryGate
from trainers.rollout.types import LATE, Fate, Group, Totals

WATCHED = {"checkpoint.keep_best": 0, "watchdog.warn_s": 200.0, "watchdog.end_s": 300.0, "evaluation.temperature": 0.5}


def never(when: Callable[[Any, SamplingOptions], bool]) -> Actors:
    """Stand-ins whose generators never answer such requests."""

    class Silent(Generator):
        asked = 0

        async def do_generate(
            self, prompt_ids: Any, options: SamplingOptions, request_id: str, held: bool, at_least: int
        ) -> Completion:
            self.asked += 1
            if when(self, options):
                await asyncio.Event().wait()
            return await super().do_generate(prompt_ids, options, request_id, held, at_least)

    return {**STAND_INS, "Generator": Silent}


def held_out(generator: Any, options: SamplingOptions) -> bool:
    """Whether a request belongs to an evaluation after the first update."""
    return bool(generator._version > 0 and options.temperature == 0.5)


def failures(events: list[Any]) -> list[str]:
    return [details for _, name, details in events if name == "failed"]


@pytest.mark.parametrize(
    ("when", "overrides", "saved"),
    [
        (lambda generator, _: generator.asked == 2, {}, []),
        (held_out, {"evaluation.pinned": False}, [5]),
        # its weights are held: two more steps, until new ones have to reach the generators
        (held_out, {}, [4]),
        (held_out, {"evaluation.every": 0}, [5]),
    ],
    ids=["before training", "beside training", "beside training, pinned", "after training"],
)
def test_an_evaluation_that_never_ends_is_diagnosed_and_costs_no_step(
    tmp_path: Path, when: Callable[[Any, SamplingOptions], bool], overrides: dict[str, Any], saved: list[int]
) -> None:
    (failure,) = failures(dry_run({**WATCHED, **overrides}, tmp_path, never(when)))
    assert "no progress for 5m" in failure
    assert "episode eval-" in failure
    steps = list((tmp_path / "runs" / "run" / "checkpoints").glob("step-*/progress.json"))
    assert [json.loads(step.read_text())["step"] for step in steps] == saved


def test_a_generator_that_pulls_slowly_delays_only_itself(tmp_path: Path) -> None:
    class Slow(Generator):
        quick = False

        async def do_update_weights(self, version: int, published: Any) -> dict[str, float]:
            if self.name == "generator1" and not self.quick:
                await asyncio.sleep(100.0)
            return await super().do_update_weights(version, published)

        async def _sample(self, prompt_ids: Any, options: SamplingOptions) -> Completion:
            await asyncio.sleep(0.1)
            return Completion(prompt_ids, [20] * 4, [-1.0] * 4, [self._version] * 4, "stop", self._version)

    class Quick(Slow):
        quick = True

    recipe = {"generator.num_replicas": 2, "grpo.max_off_policy_steps": 1, "evaluation.every": 0}
    ends = {}
    for generator in (Slow, Quick):
        events = dry_run(recipe, tmp_path / generator.__name__, {**STAND_INS, "Generator": generator})
        assert failures(events) == []
        rows = [ast.literal_eval(details)[0] for _, what, details in events if what == "metrics"]
        ages = [row["staleness/max"] for row in rows if "staleness/max" in row]
        assert len(ages) == 5
        assert max(ages) <= 1.0, "the bound holds"
        assert {row["weights/behind"] for row in rows if "weights/behind" in row} == {float(generator is Slow)}
        pushes = [when for when, what, _ in events if what == "trainer.begin_push"]
        ends[generator] = pushes[-1] - pushes[0]
    assert ends[Slow] - ends[Quick] < 5 * (PATIENCE_S + 0.5), "every version has been given its time, and no more"


def test_a_warm_up_that_stands_still_is_diagnosed(tmp_path: Path) -> None:
    class Stuck(TitanTrainer):
        steps = 0

        async def do_train(self, sequences: Any) -> dict[str, float]:
            self.steps += 1
            if self.steps == 4:
                await asyncio.Event().wait()
            return await super().do_train(sequences)

    (failure,) = failures(dry_run({**WATCHED, "warmup.steps": 12}, tmp_path, {**STAND_INS, "TitanTrainer": Stuck}))
    assert "no progress for 5m00s: stage warm-up, 3 of 12 done" in failure


def test_an_actor_that_does_not_answer_is_itself_the_diagnosis(tmp_path: Path) -> None:
    config = load_config("coding_rlvr", ["watchdog.warn_s=20", "watchdog.end_s=30", "logging.timeline=false"])
    run = Run(config, RunFolder(tmp_path / "run"))

    class Deaf:
        def check(self) -> None: ...

        async def stats(self) -> Any:
            await asyncio.Event().wait()

    async def report() -> None:
        deaf: Any = Deaf()
        rollouts: Any = SimpleNamespace(
            episodes_running=0,
            episodes_ended=0,
            longest_waiting=lambda: "no episode",
            look=deaf.stats,
            gate=MemoryGate(run),
        )
        await Status(run, deaf, rollouts, Account("trainer", "wait for episodes")).report(deaf)

    with pytest.raises(
        ForgeError, match="a generator does not answer; the replay buffer does not answer; a rollout worker does not"
    ):
        virtual_time.run(report())


def test_groups_wait_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()

    def free_gb() -> float:
        return 0.3 if 5 < next(looks) < 50 else 4.0

    monkeypatch.setattr(machine, "free_memory_gb", free_gb)
    events = dry_run({}, tmp_path)
    assert not failures(events)
    assert "memory is short" in next(details for _, name, details in events if name == "warnings")
    steps = [details for _, name, details in events if name == "batch"]
    assert len(steps) == 5


def test_without_memory_no_held_out_episode_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_until = 30.0
    monkeypatch.setattr(machine, "free_memory_gb", lambda: 0.3 if loop_time() < short_until else 4.0)
    events = dry_run({"rollouts.workers": 2}, tmp_path)
    assert not failures(events)
    begun = [second for second, name, _ in events if re.fullmatch(r"rollouts\d\.evaluate", name)]
    assert begun
    assert min(begun) >= short_until


def test_memory_that_nothing_frees_is_the_cause_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory_gb", lambda: 0.25)
    (failure,) = failures(dry_run(WATCHED, tmp_path))
    assert "no progress for 5m" in failure
    assert "new episodes wait for memory: 0.25 GiB are free, watchdog.free_memory_gb=0.5" in failure


def loop_time() -> float:
    return asyncio.get_running_loop().time()


# --- the time of a group


class Busy(Policy, PolicySession):
    """A model that answers one request at a time, each in two seconds."""

    def __init__(self, stuck: int = -1) -> None:
        self._free = asyncio.Semaphore(1)
        self._asked = 0
        self._stuck = stuck

    def session(self, tools: list[Any], *, seed: int | None = None) -> Any:
        return self

    async def reply(self, observation: Any) -> Reply:
        self._asked += 1
        if self._asked == self._stuck:
            await asyncio.Event().wait()
        async with self._free:
            await asyncio.sleep(2.0)
        return Reply(Message(role="assistant", content="one"), [1], [2], [-1.0], [0])


def full_marks(answer: str) -> float:
    return 1.0


class Paying(Sums):
    """Every answer is right."""

    rubric = fe.Rubric(full_marks)


class Clinging(Sums):
    """Never closes."""

    async def close(self) -> None:
        await asyncio.Event().wait()


class Faulty(Sums):
    """Its author made a mistake, which one of the episodes meets."""

    mistakes = 1

    async def score(self) -> Any:
        if Faulty.mistakes:
            Faulty.mistakes -= 1
            raise KeyError("oops")
        return await super().score()


def played(make: Callable[[], fe.Environment], policy: Any, groups: int = 1) -> tuple[list[int], float]:
    """Episodes of each group that were not late, and the seconds all of them took."""
    config = load_config("coding_rlvr", ["grpo.group_size=4", "grpo.group_timeout_s=20"])

    async def play() -> tuple[list[int], float]:
        player, plays = Player(config, make, warn=lambda text: None), policy()
        found = await asyncio.gather(*(player.group(index, index, plays) for index in range(groups)))
        return [len(group.episodes) for group in found], asyncio.get_running_loop().time()

    return virtual_time.run(play())


def test_a_group_that_waits_behind_others_is_not_late() -> None:
    counts, seconds = played(Sums, Busy, groups=8)
    assert counts == [4] * 8
    assert seconds == pytest.approx(64.0)


def late_group(make: Callable[[], fe.Environment], policy: Any, on_timeout: str) -> tuple[Group, float]:
    """A group of four with a limit of 20 s, and the seconds it took."""
    overrides = ["grpo.group_size=4", "grpo.group_timeout_s=20", f"grpo.on_timeout={on_timeout}"]
    config = load_config("coding_rlvr", overrides)

    async def play() -> tuple[Group, float]:
        player = Player(config, make, warn=lambda text: None)
        return await player.group(0, 0, policy), asyncio.get_running_loop().time()

    return virtual_time.run(play())


class Slow(Busy):
    """One answer takes thirty seconds, which is longer than a group has."""

    async def reply(self, observation: Any) -> Reply:
        if self._asked == 1:
            self._asked += 1
            await asyncio.sleep(30.0)
        return await super().reply(observation)


@pytest.mark.parametrize(
    ("on_timeout", "rewards", "seconds"),
    [("leave_out", [1.0] * 3, 22.0), ("zero", [0.0, 1.0, 1.0, 1.0], 22.0), ("wait", [1.0] * 4, 32.0)],
)
def test_a_recipe_chooses_what_becomes_of_late_episodes(on_timeout: str, rewards: list[float], seconds: float) -> None:
    group, took = late_group(Paying, Slow(), on_timeout)
    assert sorted(group.rewards.tolist()) == rewards
    assert (group.late, len(group.finished)) == (1, 4 if on_timeout == "wait" else 3)
    assert took == pytest.approx(seconds)
    assert Totals.of(group, Fate.KEPT).episodes_late == 1
    advantages = token_advantages(GroupMean(), group)
    assert [len(values) for values in advantages] == [own.num_sampled_tokens for own in group.valid]
    if on_timeout == "zero":
        (late,) = (episode for episode in group.valid if episode not in group.finished)
        assert (late.reward, late.truncated, late.truncation, late.turns) == (0.0, True, LATE, [])
        packed = pack(group.valid, advantages)
        assert packed.record.column("reward").tolist() == group.rewards.tolist()
        for estimator in (TurnReturns(), ByConversation(), LeaveOneOut()):
            assert len(token_advantages(estimator, group)) == 4
        by_turn = zip(token_advantages(TurnReturns(), group), group.valid, strict=True)
        in_time = next(values for values, episode in by_turn if episode.reward)
        assert in_time.tolist() == pytest.approx([1 - 2 / 3]), "the late one counts in its baseline"


def test_a_straggler_is_left_out_when_its_time_is_over() -> None:
    assert played(Sums, lambda: Busy(stuck=2)) == ([3], pytest.approx(22.0))


def test_an_environment_that_never_closes_does_not_hold_its_group() -> None:
    counts, seconds = played(Clinging, lambda: Busy(stuck=2))
    assert counts == [0]  # none had closed when the time was over
    assert seconds < 120.0


def test_a_mistake_of_the_author_costs_its_episode() -> None:
    Faulty.mistakes = 1
    assert played(Faulty, Busy)[0] == [4]


# --- what the time went to


def test_every_actor_has_an_account_of_its_time(tmp_path: Path) -> None:
    class Accounting(Generator):
        async def do_get_stats(self) -> dict[str, float]:
            now = loop_time()
            return {**await super().do_get_stats(), "time/generate": 0.25 * now, "time/wait for requests": 0.75 * now}

    dry_run({"grpo.reference.source": "initial"}, tmp_path, {**STAND_INS, "Generator": Accounting})
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward/mean" in row]
    assert len(rows) == 5
    for row in rows:
        accounted = {name.split("/")[1] for name in row if name.startswith("time/")}
        assert accounted == {"trainer", "reference", "episodes", "rollouts0", "generator", "buffer"}
    assert sum(row.get("time/generator/generate", 0.0) for row in rows) > 0
    assert any(row.get("generator/tokens_per_s", 0.0) > 0 for row in rows), "the report's curve of what is generated"


# --- what the trainer leaves out of a step


class Troubled(TitanTrainer):
    """Finds no finite gradient, and log-probabilities that are none."""

    async def do_train_on(self, buffer: Any, step: int) -> dict[str, float]:
        metrics = await super().do_train_on(buffer, step)
        return metrics | {"skipped_updates": 1.0, "sequences_not_finite": 2.0}


def test_skipped_updates_and_sequences_left_out_are_shown(tmp_path: Path) -> None:
    recipe = {"grpo.steps": 2, "evaluation.every": 0}
    events = dry_run(recipe, tmp_path, {**STAND_INS, "TitanTrainer": Troubled})
    [shown] = [details for _, what, details in events if what == "warnings"]
    [found] = ast.literal_eval(shown)
    counts = {"updates": 1, "sequences": 2}
    assert found == [f"{count} {what} of step {step} were skipped" for step in (1, 2) for what, count in counts.items()]
    metrics = [details for _, what, details in events if what == "metrics"]
    assert sum("trainer/skipped_updates" in row for row in metrics) == 2
