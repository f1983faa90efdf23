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
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.buffer.core import BufferCore
from trainers.buffer.packed import PackedGroup, pack
from trainers.buffer.saved import load_buffer, save_buffer
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
