"""Measure the replay buffer with 1,000 to 100,000 episodes: rates of add and sample, memory, bytes on the wire.

    python -m benchmarks replay_buffer [--torchforge CHECKOUT] [--actor] [--repeats 7] [--record]

The peer is torchforge's `src/forge/actors/replay_buffer.py`, loaded from a checkout and run without its remote calls,
metrics and traces. Ours is also run without its actor, and additionally with it under `--actor`. A step adds 256
episodes and samples 256, in groups of 8; its time is processor time, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import pickle
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

from benchmarks.frame import main, spread, table, take_turns
from forge_env.config.recipe import ReplaySection
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.packed import PackedGroup, pack
from trainers.buffer.types import BufferSettings

GROUP = 8
GROUPS_PER_STEP = 32
EPISODES_PER_STEP = GROUP * GROUPS_PER_STEP
PROMPT, SAMPLED = 60, 150
STEPS = 12
Step = Callable[[], Awaitable[None]]


def trajectories(rng: random.Random, version: int) -> list[Trajectory]:
    """Make a group of one-turn episodes, like those from a rollout."""
    episodes = []
    for number in range(GROUP):
        ids = np.array([rng.randrange(150_000) for _ in range(PROMPT + SAMPLED)], np.int32)
        logprobs = np.array([-rng.random() for _ in range(SAMPLED)], np.float32)
        message = Message(role="assistant", content="x" * SAMPLED)
        turn = Turn([], Reply(message, ids[:PROMPT], ids[PROMPT:], logprobs, np.full(SAMPLED, version)))
        episode = Trajectory(str(number), "env", "task", turns=[turn], metrics={"solved": number % 2})
        episodes.append(episode)
    return episodes


def group_of(rng: random.Random, version: int) -> PackedGroup:
    return pack(trajectories(rng, version), [np.full(SAMPLED, sign, np.float32) for sign in (0.5, -0.5) * (GROUP // 2)])


async def ours(buffer: LocalReplayBuffer[PackedGroup], held: int, steps: int) -> Step:
    """Fill the buffer with `held` episodes, one batch per version within the bound; return a function for one step."""
    rng = random.Random(0)
    bound = held // EPISODES_PER_STEP
    version = 0
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


def settings(held: int, sampling: str) -> BufferSettings:
    return BufferSettings(GROUPS_PER_STEP, held // EPISODES_PER_STEP, replay=ReplaySection(sampling=sampling))


def torchforge(checkout: Path) -> Any:
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
        spec = importlib.util.spec_from_file_location("peer", checkout / "src/forge/actors/replay_buffer.py")
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


async def peer(checkout: Path, held: int) -> Step:
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


async def rates(sizes: list[int], repeats: int, checkout: str) -> list[list[object]]:
    """Return a row per size: microseconds per episode of ours (two sampling rules) and the peer, and the ratio."""
    rows: list[list[object]] = []
    for held in sizes:
        steps: dict[str, Step] = {}
        for sampling in ("fifo", "prioritized"):
            buffer: LocalReplayBuffer[PackedGroup] = LocalReplayBuffer(settings(held, sampling))
            steps[sampling] = await ours(buffer, held, STEPS * repeats)
        if checkout:
            steps["peer"] = await peer(Path(checkout), held)
        taken = await take_turns({name: partial(episode_us, step) for name, step in steps.items()}, repeats)
        row = [f"{held:,}", *map(spread, taken.values())]
        if checkout:
            row.append(spread([a / b for a, b in zip(taken["peer"], taken["fifo"], strict=True)]))
        rows.append(row)
    return rows


async def memory(groups: int) -> tuple[float, float, float]:
    """Return bytes per episode of the tensors alone, of the buffer with them, and of trajectories in their place."""
    rng = random.Random(0)
    buffer: LocalReplayBuffer[PackedGroup] = LocalReplayBuffer(BufferSettings(groups, 0))
    warm = group_of(rng, 0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(groups):
        await buffer.add(group_of(rng, 0), await buffer.admit())
    held = tracemalloc.get_traced_memory()[0] - before
    groups_of_trajectories = [trajectories(rng, 0) for _ in range(groups // 10)]
    lists = tracemalloc.get_traced_memory()[0] - before - held
    tracemalloc.stop()
    return warm.nbytes / GROUP, held / groups / GROUP, lists / len(groups_of_trajectories) / GROUP


async def actor_step(held: int, steps: int) -> tuple[float, float]:
    """Return the milliseconds of adding and of sampling in a step through the actor, with all its groups at once."""
    from trainers.buffer.actor import RemoteReplayBuffer, ReplayBuffer

    process = await ReplayBuffer.as_actor(settings(held, "fifo"))
    buffer: Any = RemoteReplayBuffer(process)
    rng = random.Random(0)
    adding, sampling = [], []
    try:
        for version in range(steps):
            groups = [group_of(rng, version) for _ in range(GROUPS_PER_STEP)]
            tickets = [await buffer.admit() for _ in groups]
            started = time.perf_counter()
            await asyncio.gather(*(buffer.add(group, ticket) for group, ticket in zip(groups, tickets, strict=True)))
            added = time.perf_counter()
            await buffer.sample(version)
            adding.append(1e3 * (added - started))
            sampling.append(1e3 * (time.perf_counter() - added))
            await buffer.release(version + 1)
    finally:
        await ReplayBuffer.shutdown(process)
    return sorted(adding)[steps // 2], sorted(sampling)[steps // 2]


async def measure(args: argparse.Namespace) -> list[str]:
    rows = await rates(args.sizes, args.repeats, args.torchforge)
    tensors, held, lists = await memory(2_000)
    rng = random.Random(0)
    wire, wire_lists = (len(pickle.dumps(make(rng, 0))) / GROUP for make in (group_of, trajectories))
    columns = ["episodes held", "us an episode", "the same, `prioritized`"]
    columns += ["torchforge, us an episode", "ratio"] if args.torchforge else []
    about = (
        f"Memory of an episode with {PROMPT} prompt and {SAMPLED} sampled tokens: {tensors:.0f} bytes of tensors, "
        f"{held:.0f} bytes in the buffer ({100 * (held / tensors - 1):.1f} % more), {lists:.0f} as trajectories. "
        f"On the wire {wire:.0f} bytes, as pickled trajectories {wire_lists:.0f}."
    )
    if args.actor:
        adding, sampling = await actor_step(10_240, 15)
        about += (
            f" Through the actor, {GROUPS_PER_STEP} groups at once: {adding:.1f} ms to add, {sampling:.1f} ms to "
            "sample and fetch (median of 15)."
        )
    return [
        *table(columns, rows),
        "",
        about,
        "",
        "Processor time to add and to sample, in one process, without remote calls on either side: median (smallest "
        f"to largest) of {args.repeats} repeats of {STEPS} steps, in turns. A step is {EPISODES_PER_STEP} "
        f"episodes; ours come in groups of {GROUP} and are read for their due date, signal and priority.",
    ]


if __name__ == "__main__":
    main("Replay buffer", measure, torchforge="", actor=False, sizes=[1_024, 10_240, 102_400], repeats=7)
