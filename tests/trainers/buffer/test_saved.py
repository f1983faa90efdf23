"""A buffer's state as a file: the same to the last bit, and safe to read."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.config.recipe import ReplaySection
from forge_env.errors import UsageError
from forge_env.policy import Reply
from forge_env.trajectory import Segment, Trajectory, Turn
from forge_env.types import Message
from trainers.buffer.core import BufferCore
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.packed import PackedGroup, load_buffer, pack, save_buffer
from trainers.buffer.sequences import BatchSizes
from trainers.buffer.types import BufferSettings

FILE = "buffer.safetensors"
REPLAY = ReplaySection(sampling="prioritized", max_uses=2)
SETTINGS = BufferSettings(per_step=2, max_off_policy_steps=2, replay=REPLAY, seed=1)


def group(index: int, version: int, tokens: int, advantage: float) -> PackedGroup:
    reply = Reply(Message(role="assistant"), [1, 2], list(range(tokens)), [-0.5] * tokens, [version] * tokens)
    episode = Trajectory("e", "env", f"task-{index}", turns=[Turn([], reply)], metrics={"solved": advantage})
    return pack([episode], [np.full(tokens, advantage, np.float32)])


Actions = list[tuple[str, int, float]]


def buffer_after(actions: Actions) -> BufferCore[PackedGroup]:
    core: BufferCore[PackedGroup] = BufferCore(SETTINGS)
    for action, tokens, advantage in actions:
        step = core.window.next_step
        if action == "admit":
            core.admit()
        elif action == "add" and core.rolling:
            ticket = next(iter(core.rolling.values()))
            core.add(group(ticket.index, ticket.version, tokens, advantage), ticket)
        elif action == "take":
            core.take(step)
        elif action == "release":
            core.release(step)
    return core


@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["admit", "add", "take", "release"]), st.integers(1, 9), st.sampled_from([0.0, -1.5])
        ),
        max_size=60,
    )
)
def test_a_saved_buffer_is_the_same_to_the_last_bit(tmp_path_factory: pytest.TempPathFactory, actions: Actions) -> None:
    file = tmp_path_factory.getbasetemp() / FILE
    core = buffer_after(actions)
    save_buffer(core.state_dict(), file)
    again: BufferCore[PackedGroup] = BufferCore(SETTINGS)
    again.load_state_dict(load_buffer(file))
    assert again.state_dict() == core.state_dict()
    assert again.stats() == core.stats()


def test_a_damaged_buffer_is_named(tmp_path: Path) -> None:
    save_buffer(buffer_after([("admit", 1, 0.0), ("add", 3, 1.0)]).state_dict(), tmp_path / FILE)
    whole = (tmp_path / FILE).read_bytes()
    for damaged in (b"", whole[:-4], pickle.dumps({"format": 1})):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(UsageError, match=f"{FILE} is damaged"):
            load_buffer(tmp_path / FILE)


def forking(name: str, prompts: list[list[int]]) -> Trajectory:
    """An episode that forks at each of its prompts but the first."""
    replies = [Reply(Message(role="assistant"), prompt, [7, 8], [-0.5] * 2, [0] * 2) for prompt in prompts]
    return Trajectory(name, "env", "task", turns=[Turn([], reply) for reply in replies])


async def test_segments_know_their_episode_in_a_group_a_batch_and_a_checkpoint(tmp_path: Path) -> None:
    episodes = [forking("a", [[1]]), forking("b", [[1], [2], [3]]), forking("c", [[1], [2]])]
    packed = pack(episodes, [np.ones(episode.num_sampled_tokens, np.float32) for episode in episodes])
    assert [segment.episode for segment in packed.segments()] == [0, 1, 1, 1, 2, 2]
    buffer: LocalReplayBuffer[PackedGroup] = LocalReplayBuffer(BufferSettings(per_step=2, max_off_policy_steps=0))
    for _ in range(2):
        await buffer.add(pickle.loads(pickle.dumps(packed)), await buffer.admit())
    save_buffer(await buffer.state_dict(), tmp_path / FILE)
    await buffer.load_state_dict(load_buffer(tmp_path / FILE))
    await buffer.reserve(0)
    sizes = await buffer.batch_sizes(0)
    assert (sizes.total_sequences, sizes.total_segments) == (6, 12)
    order = sizes.numbers.argsort()
    assert sizes.sequences[order].tolist() == [0, 1, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5]
    assert sizes.sequence_targets[order].tolist() == [2, 6, 6, 6, 4, 4] * 2


@given(
    st.lists(
        st.tuples(st.integers(0, 4) | st.none(), st.sampled_from([0.0, 1.0]), st.booleans()), min_size=1, max_size=12
    )
)
def test_computed_part_keeps_advantages_and_totals(made: list[tuple[int | None, float, bool]]) -> None:
    segments = []
    for episode, advantage, finite in made:
        logprobs = np.array([0, -1, -1 if finite else np.nan], np.float32)
        mask = np.array([False, True, True])
        segments.append(Segment(np.arange(3), mask, logprobs, advantages=mask * np.float32(advantage), episode=episode))
    whole, sequences, some = (BatchSizes.of(segments, how) for how in ("all", "sequences", "segments"))
    assert set(some.numbers) <= set(sequences.numbers) <= set(whole.numbers)
    assert whole.numbers.tolist() == [at for at, (_, _, finite) in enumerate(made) if finite]
    assert some.numbers.tolist() == [at for at, (_, advantage, finite) in enumerate(made) if finite and advantage]
    assert set(sequences.sequences) == set(some.sequences)
    assert sorted(sequences.numbers) == [at for at in whole.numbers if _sequence(whole, at) in set(some.sequences)]
    totals = [(each.total_tokens, each.total_sequences, each.total_segments, each.not_finite) for each in (whole, some)]
    assert totals[0] == totals[1]
    assert whole.total_sequences == len(set(whole.sequences.tolist()))
    assert int(whole.targets.sum()) == whole.total_tokens


def _sequence(sizes: BatchSizes, number: int) -> int:
    return int(sizes.sequences[sizes.numbers.tolist().index(number)])
