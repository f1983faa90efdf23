"""Measure the replay buffer with 1,000 to 100,000 episodes: processor time of add and sample, and memory.

Both buffers run in one process, without remote calls. A step adds 256 episodes and samples 256. Our buffer receives
groups of 8 and reads each group's due date, signal and priority. The peer is torchforge's
`src/forge/actors/replay_buffer.py`, loaded from the checkout `--torchforge` without its metrics and traces.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.frame import main, ratios, spread, table, take_turns
from forge_env.config.recipe import ReplaySection
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.packed import PackedGroup, pack
from trainers.buffer.types import BufferSettings

GROUP, GROUPS_PER_STEP, STEPS = 8, 32, 12
EPISODES_PER_STEP = GROUP * GROUPS_PER_STEP
PROMPT, SAMPLED = 60, 150
Step = Callable[[], Awaitable[None]]


def group_of(rng: random.Random, version: int) -> PackedGroup:
    """Make a group of one-turn episodes, like those from a rollout."""
    episodes = []
    for number in range(GROUP):
        ids = np.array([rng.randrange(150_000) for _ in range(PROMPT + SAMPLED)], np.int32)
        logprobs = np.array([-rng.random() for _ in range(SAMPLED)], np.float32)
        message = Message(role="assistant", content="x" * SAMPLED)
        turn = Turn([], Reply(message, ids[:PROMPT], ids[PROMPT:], logprobs, np.full(SAMPLED, version)))
        episodes.append(Trajectory(str(number), "env", "task", turns=[turn], metrics={"solved": number % 2}))
    return pack(episodes, [np.full(SAMPLED, sign, np.float32) for sign in (0.5, -0.5) * (GROUP // 2)])


async def ours(held: int, steps: int, sampling: str) -> Step:
    """Fill a buffer with `held` episodes, one batch per version within the bound; return a function for one step."""
    rng, version, bound = random.Random(0), 0, held // EPISODES_PER_STEP
    settings = BufferSettings(GROUPS_PER_STEP, bound, replay=ReplaySection(sampling=sampling))
    buffer: LocalReplayBuffer[PackedGroup] = LocalReplayBuffer(settings)
    by_version = [group_of(rng, version) for version in range(bound + steps)]

    async def add() -> None:
        for _ in range(GROUPS_PER_STEP):
            await buffer.add(by_version[version], await buffer.admit())

    async def step() -> None:
        nonlocal version
        await add()
        await buffer.sample(version)
        version += 1
        await buffer.release(version)

    for _ in range(bound):
        await add()
    for _ in range(bound):
        await step()
    return step


def torchforge(checkout: str) -> Any:
    """Load the peer's buffer class, with its decorators replaced by stubs."""

    def same(function: Any) -> Any:
        return function

    stubs: dict[str, dict[str, Any]] = {
        "monarch.actor": {"endpoint": same},
        "forge.controller": {"ForgeActor": type("ForgeActor", (), {})},
        "forge.observability.metrics": {
            "record_metric": lambda *_: None,
            "Reduce": type("Reduce", (), dict.fromkeys(("SUM", "MEAN", "MAX", "MIN"))),
        },
        "forge.observability.perf_tracker": {"trace": lambda *_, **__: same},
    }
    before = dict(sys.modules)
    for name, contents in stubs.items():
        for part in (name.rpartition(".")[0], name):
            sys.modules[part] = ModuleType(part)
        vars(sys.modules[name]).update(contents)
    try:
        spec = importlib.util.spec_from_file_location("peer", Path(checkout, "src/forge/actors/replay_buffer.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["peer"] = module
        spec.loader.exec_module(module)
        return module.ReplayBuffer
    finally:
        sys.modules.clear()
        sys.modules.update(before)


@dataclass(slots=True)
class PeerEpisode:
    policy_version: int


async def peer(checkout: str, held: int) -> Step:
    buffer = torchforge(checkout)(batch_size=EPISODES_PER_STEP, max_policy_age=10**9, seed=0)
    await buffer.setup()
    for _ in range(held):
        await buffer.add(PeerEpisode(0))

    async def step() -> None:
        for _ in range(EPISODES_PER_STEP):
            await buffer.add(PeerEpisode(0))
        await buffer.sample(curr_policy_version=1)

    return step


async def episode_us(step: Step) -> float:
    """Return the processor time per episode of a step, in microseconds, as the mean over `STEPS`."""
    started = time.process_time()
    for _ in range(STEPS):
        await step()
    return 1e6 * (time.process_time() - started) / STEPS / EPISODES_PER_STEP


async def memory(groups: int) -> tuple[float, float]:
    """Return bytes per episode of the tensors alone, and of the buffer with them."""
    rng, buffer = random.Random(0), LocalReplayBuffer[PackedGroup](BufferSettings(groups, 0))
    tensors = group_of(rng, 0).nbytes
    tracemalloc.start()
    for _ in range(groups):
        await buffer.add(group_of(rng, 0), await buffer.admit())
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return tensors / GROUP, held / groups / GROUP


async def measure(args: argparse.Namespace) -> list[str]:
    rows: list[list[object]] = []
    for held in args.sizes:
        steps = {rule: await ours(held, STEPS * args.repeats, rule) for rule in ("fifo", "prioritized")}
        if args.torchforge:
            steps["peer"] = await peer(args.torchforge, held)
        taken = await take_turns({name: partial(episode_us, step) for name, step in steps.items()}, args.repeats)
        of_ours = [spread(ratios(taken["peer"], taken["fifo"]))] if args.torchforge else []
        rows.append([f"{held:,}", *map(spread, taken.values()), *of_ours])
    columns = ["episodes held", "us an episode", "the same, `prioritized`"]
    columns += ["torchforge, us an episode", "ratio"] if args.torchforge else []
    tensors, held = await memory(2_000)
    about = (
        f"Memory of an episode with {PROMPT} prompt and {SAMPLED} sampled tokens: {tensors:.0f} bytes of tensors, "
        f"{held:.0f} bytes in the buffer ({100 * (held / tensors - 1):.1f} % more)."
    )
    return [*table(columns, rows), "", about]


if __name__ == "__main__":
    main("Replay buffer", measure, torchforge="", sizes=[1_024, 10_240, 102_400], repeats=7)
