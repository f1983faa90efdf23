"""Order, re-use, eviction and filtering, case by case; groups in their packed form."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.config import load_config
from forge_env.config.recipe import ReplaySection
from forge_env.errors import ConfigError, NotRegisteredError, UsageError
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from tests.trainers.buffer.buffer_model import FakeGroup
from trainers.buffer.core import BufferCore
from trainers.buffer.packed import PackedGroup, pack
from trainers.buffer.rules import make_rules
from trainers.buffer.types import BufferSettings, Held, Ticket


def admit(core: BufferCore[FakeGroup], count: int) -> list[Ticket]:
    tickets = [core.admit() for _ in range(count)]
    assert None not in tickets
    return tickets


def fill(core: BufferCore[FakeGroup], *priorities: float) -> None:
    for ticket, priority in zip(admit(core, len(priorities)), priorities, strict=True):
        core.add(FakeGroup.of(ticket.index, ticket.version, priority=priority), ticket)


def step(core: BufferCore[FakeGroup]) -> list[int]:
    """Train one step and let the weights arrive; which groups it was given."""
    reserved = core.take(core.window.next_step)
    core.release(reserved.step + 1)
    return reserved.indices


def settings(per_step: int, bound: int, **fields: object) -> BufferSettings:
    own = {name: fields.pop(name) for name in list(fields) if name in ReplaySection.model_fields}
    return BufferSettings(per_step, bound, replay=ReplaySection(**own), **fields)


@pytest.mark.parametrize(("sampling", "expected"), [("fifo", [0, 1, 2, 3]), ("freshest", [0, 2, 3, 1])])
def test_a_rule_orders_groups_as_far_as_due_dates_allow(sampling: str, expected: list[int]) -> None:
    core: BufferCore[FakeGroup] = BufferCore(settings(1, 3, sampling=sampling))
    fill(core, 0.5)
    trained = []
    for _ in range(4):  # group 1, as old as group 0, is due at step 3
        fill(core, 0.5)
        trained += step(core)
    assert trained == expected


def test_prioritized_draws_in_proportion_to_the_advantages() -> None:
    sampling, _ = make_rules(ReplaySection(sampling="prioritized"))
    rng = random.Random(0)
    first: Counter[int] = Counter()
    for _ in range(4000):
        groups = [Held(index, 0, 1, priority, None) for index, priority in enumerate((0.0, 1.0, 3.0))]
        first[min(groups, key=lambda held: (sampling(held, rng), held.index)).index] += 1
    assert first[0] == 0
    assert first[2] / first[1] == pytest.approx(3.0, rel=0.15)


def test_used_groups_fill_the_places_of_those_not_rolled_out() -> None:
    core: BufferCore[FakeGroup] = BufferCore(settings(4, 2, max_uses=2))
    fill(core, 0.1, 0.2, 0.3, 0.4)
    assert step(core) == [0, 1, 2, 3]
    assert core.take(1) is None, "no new group at all"
    fill(core, 0.5)
    assert core.take(1) is None, "less than one new group in two"
    fill(core, 0.6)
    assert step(core) == [0, 1, 4, 5]
    stats = core.stats()
    assert (stats.trained, stats.reused, stats.kept) == (6, 2, 4)
    fill(core, 0.7, 0.8, 0.9, 1.0)
    assert step(core) == [6, 7, 8, 9], "new groups come first"


def test_with_reuse_fewer_groups_are_rolled_out() -> None:
    once: BufferCore[FakeGroup] = BufferCore(settings(4, 1))
    twice: BufferCore[FakeGroup] = BufferCore(settings(4, 1, max_uses=2))
    for core, slots in ((once, 8), (twice, 4)):
        admit(core, slots)
        assert core.admit() is None


def test_the_first_and_only_step_has_all_its_groups_with_reuse_too() -> None:
    core: BufferCore[FakeGroup] = BufferCore(settings(4, 3, max_uses=4, steps=1))
    fill(core, 0.1, 0.2, 0.3, 0.4)
    assert core.admit() is None
    assert step(core) == [0, 1, 2, 3]


@pytest.mark.parametrize(("eviction", "left"), [("oldest", {2, 3}), ("least_advantage", {0, 2}), ("most_used", {2, 3})])
def test_beyond_the_capacity_used_groups_leave(eviction: str, left: set[int]) -> None:
    core: BufferCore[FakeGroup] = BufferCore(settings(4, 2, max_uses=3, capacity=2, eviction=eviction))
    fill(core, 0.9, 0.2, 0.8, 0.3)
    step(core)
    if eviction == "least_advantage":
        assert {held.index for held in core.used} == left
    assert core.counters.evicted == 2


def test_more_steps_and_a_smaller_bound_after_a_restore() -> None:
    core: BufferCore[FakeGroup] = BufferCore(settings(1, 2, steps=2))
    fill(core, 0.1, 0.2)
    assert core.admit() is None, "the run has two steps"
    longer: BufferCore[FakeGroup] = BufferCore(settings(1, 2, steps=5))
    longer.load_state_dict(core.state_dict())
    fill(longer, 0.3)
    tighter: BufferCore[FakeGroup] = BufferCore(settings(1, 0, steps=5))
    tighter.load_state_dict(longer.state_dict())
    assert tighter.counters.discarded_stale == 2
    assert step(tighter) == [0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.replay.max_uses=4", "grpo.max_off_policy_steps=2"], "max_off_policy_steps + 1 = 3"),
        (["grpo.replay.capacity=4"], "set max_uses above 1"),
        (["grpo.replay.eviction=most_used", "grpo.replay.max_uses=2"], "set capacity"),
    ],
)
def test_recipes_that_would_do_nothing_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("coding_rlvr", overrides)
    assert message in str(caught.value)


def test_rules_are_found_by_name_or_refused_with_the_fix() -> None:
    with pytest.raises(NotRegisteredError, match=r"no sampling rule 'freshes' \(did you mean 'freshest'"):
        make_rules(ReplaySection(sampling="freshes"))
    with pytest.raises(UsageError, match="alpha=-1 is not within"):
        make_rules(ReplaySection(sampling="prioritized", options={"alpha": -1}))
    with pytest.raises(UsageError, match=r"grpo.replay.options.alpha: unknown key \(known here: none\)"):
        make_rules(ReplaySection(sampling="fifo", options={"alpha": 1}))
    sampling, eviction = make_rules(
        ReplaySection(sampling="trainers.buffer.rules:Prioritized", max_uses=2, capacity=1, eviction="most_used")
    )
    held = Held(0, 0, 1, 1.0, FakeGroup.of(0, 0), uses=2)
    assert sampling(held, random.Random(0)) == random.Random(0).expovariate(1.0)
    assert eviction(held) == -2
    with pytest.raises(UsageError, match="at most max_off_policy_steps"):
        BufferSettings(1, 0, replay=ReplaySection(max_uses=2))
    with pytest.raises(UsageError, match="per_step is at least 1"):
        BufferSettings(0, 0)


# --- packed groups

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    done: list[Turn] = []
    prompt: list[int] = draw(TOKENS)
    for _ in range(draw(st.integers(0, 3))):
        sampled = draw(TOKENS)
        logprobs = [draw(st.floats(-20, 0, width=32)) for _ in sampled]
        versions = [draw(st.integers(0, 99)) for _ in sampled]
        done.append(Turn([], Reply(Message(role="assistant"), prompt, sampled, logprobs, versions)))
        prompt = draw(TOKENS) if draw(st.booleans()) else prompt + sampled + draw(TOKENS)
    return done


@st.composite
def played_with_advantages(draw: st.DrawFn) -> tuple[list[Trajectory], list[Any], list[Any]]:
    """Episodes, and for every token they sampled an advantage (often one for all) and whether it is learned."""
    episodes, advantages, masks = [], [], []
    for own in draw(st.lists(turns(), max_size=4)):
        reward = draw(st.floats(-5, 5))
        episode = Trajectory(
            "e", "env", "task", turns=own, reward=reward, truncated=reward > 0, metrics={"tokens": 3.0}
        )
        count = episode.num_sampled_tokens
        values = st.sampled_from([0.0, 1.0]) | st.floats(-5, 5, width=32)
        each = [draw(values)] * count if draw(st.booleans()) else [draw(values) for _ in range(count)]
        episodes.append(episode)
        advantages.append(np.array(each, np.float32))
        masks.append(np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_))
    return episodes, advantages, masks


@given(played=played_with_advantages(), masked=st.booleans())
def test_packed_groups_keep_their_segments(played: tuple[list[Trajectory], list[Any], list[Any]], masked: bool) -> None:
    episodes, advantages, masks = played
    if not masked:
        masks = [np.ones_like(mask) for mask in masks]
    group = pack(episodes, advantages, masks if masked else None)
    again = pickle.loads(pickle.dumps(group))
    assert again == group
    assert again.columns is group.columns
    segments = [segment for episode in episodes for segment in episode.segments()]
    given_advantages, learned = (np.concatenate([[], *arrays]) for arrays in (advantages, masks))
    assert len(again.segments()) == len(segments)
    start = 0
    for packed, segment in zip(again.segments(), segments, strict=True):
        part = slice(start, start + int(segment.mask.sum()))
        start = part.stop
        assert packed.token_ids.tolist() == segment.token_ids.tolist()
        assert packed.logprobs.tolist() == segment.logprobs.tolist()  # of what isn't learned too
        assert packed.versions.tolist() == segment.versions.tolist()
        assert packed.advantages[segment.mask].tolist() == given_advantages[part].tolist()
        assert packed.mask[segment.mask].tolist() == learned[part].tolist()
        assert not packed.mask[~segment.mask].any()
        assert not packed.advantages[~segment.mask].any()
    assert again.num_tokens == sum(episode.num_sampled_tokens for episode in episodes)
    assert again.oldest_version == min(
        (episode.oldest_version for episode in episodes if episode.num_sampled_tokens), default=-1
    )
    assert again.record.column("reward").tolist() == [episode.reward for episode in episodes]
    assert again.record.column("tokens").tolist() == [episode.num_sampled_tokens for episode in episodes]
    means = [values.mean() if len(values) else 0.0 for values in advantages]
    assert again.record.column("advantage") == pytest.approx(means, abs=1e-6)
    assert again.has_signal == (np.abs(given_advantages[learned.astype(bool)]) > 1e-8).any()
    if episodes:
        assert again.record.metrics["tokens"].tolist() == [3.0] * len(episodes)
        sizes = [np.abs(values[mask]) for values, mask in zip(advantages, masks, strict=True)]
        assert again.priority == pytest.approx(np.mean([size.mean() if len(size) else 0.0 for size in sizes]), abs=1e-6)


def test_an_advantage_is_due_for_every_sampled_token() -> None:
    turn = Turn([], Reply(Message(role="assistant"), [1], [2, 3], [-0.5] * 2, [0] * 2))
    with pytest.raises(UsageError, match="1 advantages for 2 sampled tokens"):
        pack([Trajectory("e", "env", "task", turns=[turn])], [np.zeros(1, np.float32)])


def test_a_packed_group_is_hardly_larger_than_its_tensors() -> None:
    turn = Turn([], Reply(Message(role="assistant"), range(60), range(150), [-0.5] * 150, [3] * 150))
    episodes = [Trajectory("e", "env", "task", turns=[turn]) for _ in range(8)]
    group = pack(episodes, [np.full(150, 0.5, np.float32)] * 8)
    assert isinstance(group, PackedGroup)
    assert len(pickle.dumps(group)) < 1.05 * group.nbytes
    assert group.nbytes < 8 * (210 * 4.2 + 150 * 4 + 60)  # versions and advantages are runs


def test_a_state_needs_no_groups_that_its_weights_were_trained_on() -> None:
    """After a restart at those weights it is the same buffer, with and without them."""
    core: BufferCore[FakeGroup] = BufferCore(settings(2, 1))
    fill(core, 0.5, 0.1, 0.2, 0.3)
    core.take(0)
    found = []
    for trained in (0, 1):
        state = core.state_dict(trained)
        assert list(state["in_training"]) == ([] if trained else [0])
        again: BufferCore[FakeGroup] = BufferCore(core.settings)
        again.load_state_dict(state)
        again.restart(1)
        found.append(again.state_dict())
    assert found[0] == found[1]
