"""Measure the capacity of a run in turns per second: rollout workers, controller, buffer, simulated generators.

python -m benchmarks rollouts [--workers 1 4] [--groups 400] [--open 10000] [--record]

Everything is real except the generators, the trainer and the work of tools. Workers, in their own processes, render,
sample, parse, score, record and pack episodes of ten turns and add them to the buffer; the controller issues tickets,
keeps statistics and polls every worker once a second; a trainer that takes no time consumes batch after batch. Measured
is the CPU time of each process: with a core to itself, a worker sustains 1 / (its CPU time per turn) turns per second,
and a run the sum of its workers, unless the controller or the buffer sustains less. The first row plays in the
controller's process, without worker processes.

`--open N` keeps N episodes open at once and measures the memory of each, in whichever process: the growth of workers,
controller and buffer until the first episode ends, when all are at their last turn or the one before. Their generators
answer more slowly, and workers that wait between turns have cold caches, so compare the cost of a turn with that of few
episodes on the same generators. The column `counted` has Python's allocations by then in one process that is both
worker and controller, with a quarter of the episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import forge_env as fe
from benchmarks.frame import apart, main, table
from forge_env.config import RunConfig
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.policy import NO_TOKENS
from forge_env.run import Run, RunFolder
from forge_env.types import Message
from trainers.actors.actor import ForgeActor, concurrent_endpoint
from trainers.actors.processes import settle_heap
from trainers.algorithms.grpo import Weighing
from trainers.buffer.actor import RemoteReplayBuffer, ReplayBuffer
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings
from trainers.generator.client import Member
from trainers.generator.types import Completion, SamplingOptions
from trainers.loop.stack import prepare_controller
from trainers.rollout.local import LocalWorker, WorkerSettings
from trainers.rollout.rollouts import Crew, Rollouts
from trainers.rollout.types import Links

TURNS, GROUP_SIZE, GENERATORS = 10, 8, 2
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
NEWEST = 1 << 20
"""Policy version of every token; the buffer treats unknown versions as the newest that it knows."""
LETTERS = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=20_000))
"""Text with about one token per letter, for any tokenizer."""


class ChatterConfig(ToolEnvironmentConfig):
    """Options of `Chatter`."""

    told: int = 60
    """Characters of every tool result."""


def talked(task: fe.Task, completion: str) -> float:
    """An arbitrary reward of 0 or 1."""
    return float(hash(completion) % 2)


class Chatter(fe.ToolEnvironment):
    """Conversation with a tool that does nothing."""

    config_class = ChatterConfig
    config: ChatterConfig
    splits = ("train", "eval")
    rubric = fe.Rubric(talked)

    def task(self, split: str, index: int) -> fe.Task:
        """Return a task; there is no limit to their number."""
        return fe.Task(id=f"{split}-{index}", split=split, prompt=f"Conversation {index}: begin.")

    def demonstrate(self, task: fe.Task, rng: random.Random) -> list[Message]:
        """Return sample text to build a tokenizer from."""
        return [*self.prompt(task), Message(role="assistant", content=f"{rng.random()}")]

    @fe.tool
    async def note(self, text: str) -> str:
        """Take a note.

        Args:
            text: the note.
        """
        return LETTERS[: self.config.told]


def reply(length: int) -> str:
    """Return an assistant message with `length` letters and a call of the tool."""
    call = json.dumps({"name": "note", "arguments": {"text": "as above"}})
    return f"{LETTERS[:length]}\n<tool_call>\n{call}\n</tool_call><|im_end|>"


class SimulatedGenerator(ForgeActor):
    """Generator that answers every request with the same tokens after a delay.

    Args:
        token_ids: sampled tokens of every answer.
        latency_s: seconds until the answer.
    """

    def __init__(self, token_ids: list[int], latency_s: float) -> None:
        self._token_ids = np.array(token_ids, np.int32)
        self._latency_s = latency_s

    @concurrent_endpoint
    async def setup(self) -> None:
        settle_heap()

    @concurrent_endpoint
    async def generate(
        self, prompt_ids: Any, options: SamplingOptions, request_id: str, held: bool = False, at_least: int = 0
    ) -> Completion:
        """See `Generator.generate`."""
        await asyncio.sleep(self._latency_s)
        count = len(self._token_ids)
        logprobs, versions = np.full(count, -1.0, np.float32), np.full(count, NEWEST, np.int32)
        return Completion(NO_TOKENS, self._token_ids, logprobs, versions, "stop", 0)

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        """Do nothing: the caller no longer waits for the request."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        workers: worker processes; 0 plays in the controller's process.
        tokens: approximate tokens of an episode.
        groups: groups to play.
        open: groups played at once.
        latency_s: seconds until a generator answers.
        counted: whether to count Python's allocations, which doubles the time.
    """

    workers: int
    tokens: int
    groups: int
    open: int
    latency_s: float
    counted: bool = False


@dataclass
class Measured:
    """Results of a case: CPU seconds by process, and memory growth in MB until the first episode ended, by process."""

    turns: int
    tokens: float
    wall_s: float
    cpu_s: dict[str, float]
    grown_mb: dict[str, float]

    def per_turn(self, role: str) -> float:
        """Return CPU seconds per turn, summed over the processes of a role."""
        spent = sum(seconds for name, seconds in self.cpu_s.items() if name.startswith(role))
        return spent / self.turns


class Within:
    """Crew of one worker in this process; has the interface of `Crew`."""

    count = 1

    def __init__(self, settings: WorkerSettings) -> None:
        self.memory: Any = None
        self._worker = LocalWorker(settings)
        self.start, self.connect = self._worker.setup, self._worker.connect

    async def call(self, number: int, endpoint: str, request: Any) -> Any:
        return await getattr(self._worker, endpoint)(request)

    async def call_all(self, endpoint: str, /, *args: Any) -> list[Any]:
        return [await getattr(self._worker, endpoint)(*args)]

    async def restore(self) -> None:
        """Do nothing: there is no state to restore."""

    async def close(self) -> list[Any]:
        return [await self._worker.close()]

    async def stop(self) -> None:
        """Do nothing: the worker ends with this process."""


def cpu_s(pid: int) -> float:
    """Return CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def memory_mb(case: Case, pids: Mapping[str, int]) -> dict[str, float]:
    """Return memory in MB: resident for each process, or allocated by Python in this process if `counted`."""
    if case.counted:
        return {"controller": tracemalloc.get_traced_memory()[0] / 1e6}
    pages = {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for name, pid in pids.items()}
    return {name: count * os.sysconf("SC_PAGE_SIZE") / 1e6 for name, count in pages.items()}


async def play(case: Case, scratch: Path) -> Measured:
    """Set up the actors of a case and play its groups."""
    from trainers.model.chat import Chat
    from trainers.model.tiny import build_tiny_folder

    tokens_per_message = case.tokens // 2 // TURNS - 15  # leaves room for the chat format
    config = RunConfig.model_validate(
        {
            "environment": {
                "name": "benchmarks.rollouts:Chatter",
                "options": {"told": tokens_per_message, "max_turns": TURNS},
            },
            "generator": {"num_replicas": GENERATORS},
            "rollouts": {"workers": max(1, case.workers)},
            "sandbox": {"engine": "local", "concurrency": max(1, case.workers)},
            "model": {"max_length": 32_768},
            "grpo": {"group_size": GROUP_SIZE, "groups_per_step": case.open, "group_timeout_s": 3600},
            "logging": {"timeline": False, "tensorboard": False},
        }
    )
    environment = fe.make(config.environment.name, **config.environment.options)
    model = build_tiny_folder(config.model, environment, 0, scratch / "model")
    token_ids = Chat.of(model, config.model).tokenizer.encode(reply(tokens_per_message))
    run = Run(config, RunFolder(scratch / "run"))
    run.folder.create()
    actors = []
    try:
        for number in range(GENERATORS):
            placed = SimulatedGenerator.options(mesh_name=f"generator{number}")
            actors.append(await placed.as_actor(token_ids, case.latency_s))
        settings = BufferSettings(case.open, 0, steps=-(-case.groups // case.open))
        actors.append(await ReplayBuffer.options(mesh_name="buffer").as_actor(settings))
        buffer: Any = RemoteReplayBuffer(actors[-1])
        settings_of_workers = [
            WorkerSettings(number, config, run.folder.root, model, Weighing) for number in range(case.workers or 1)
        ]
        crew: Any = Crew(settings_of_workers) if case.workers else Within(settings_of_workers[0])
        await crew.start()
        try:
            rollouts = Rollouts(run, environment, crew)
            members = [Member(number, 1, actors[number], True) for number in range(GENERATORS)]
            await rollouts.connect(Links(members, buffer))
            pids = {"controller": os.getpid(), "buffer": actors[-1]._forge_pids[0]}
            if case.workers:
                pids |= {f"worker{each.number}": each.actor._forge_pids[0] for each in crew.replicas}
            return await play_groups(case, rollouts, buffer, pids)
        finally:
            await crew.close()
            await crew.stop()
    finally:
        for actor in actors:
            await SimulatedGenerator.shutdown(actor)
        run.close()
        run.folder.release()


async def play_groups(
    case: Case, rollouts: Rollouts, buffer: LocalReplayBuffer[Any], pids: Mapping[str, int]
) -> Measured:
    """Play all groups and measure from the first ticket to the last step."""
    if case.counted:
        tracemalloc.start()
    before, began = {name: cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
    empty = largest = memory_mb(case, pids)

    async def generate() -> None:
        async with asyncio.TaskGroup() as playing:
            while True:
                playing.create_task(rollouts.group(await buffer.admit()))

    async def look() -> None:
        nonlocal largest
        while True:
            await asyncio.sleep(1.0)
            await rollouts.look()
            if not rollouts.episodes_ended:
                largest = max(largest, memory_mb(case, pids), key=lambda memory: sum(memory.values()))

    async with asyncio.TaskGroup() as group:
        background = [group.create_task(generate()), group.create_task(look())]
        for step in range(-(-case.groups // case.open)):
            await buffer.reserve(step)
            await buffer.release(step + 1)
        wall = time.perf_counter() - began
        spent = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
        for task in background:
            task.cancel()
    totals = rollouts.totals
    assert not totals.episodes_invalid + totals.episodes_late, totals
    tokens = totals.tokens_generated / totals.episodes
    grown = {name: largest[name] - empty[name] for name in empty}
    return Measured(case.groups * GROUP_SIZE * TURNS, tokens, wall, spent, grown)


async def played(case: dict[str, Any]) -> dict[str, Any]:
    prepare_controller()
    with tempfile.TemporaryDirectory() as scratch:
        return asdict(await play(Case(**case), Path(scratch)))


def one(case: Case) -> Measured:
    """Measure a case in its own process."""
    return Measured(**apart("benchmarks.rollouts:played", asdict(case)))


def row(case: Case, found: Measured) -> list[object]:
    """Return one line of the table, without the memory of open episodes."""
    controller, buffer = found.per_turn("controller"), found.per_turn("buffer")
    worker = found.per_turn("worker") if case.workers else controller
    limits = [1 / buffer, 1 / controller, *([case.workers / worker] if case.workers else [])]
    return [
        case.workers or "none",
        case.tokens,
        case.open * GROUP_SIZE,
        case.latency_s,
        f"{worker * 1e3:.2f}" if case.workers else "in the controller",
        f"{controller * 1e3:.3f}",
        f"{buffer * 1e3:.3f}",
        f"{min(limits):.0f}",
        f"{found.turns / found.wall_s:.0f}",
    ]


def open_kb(case: Case, found: Measured, role: str = "") -> str:
    """Return the kilobytes of an open episode in the processes of a role."""
    grown = sum(megabytes for name, megabytes in found.grown_mb.items() if name.startswith(role))
    return f"{grown * 1e3 / (case.open * GROUP_SIZE):.1f}"


def measure(args: argparse.Namespace) -> list[str]:
    most, groups = args.workers[-1], args.open // GROUP_SIZE
    cases = [Case(workers, 1500, args.groups, 50, 0.05) for workers in [0, *args.workers]]
    cases += [Case(workers, 9000, args.groups // 4, 50, 0.05) for workers in [0, most]]
    cases += [Case(most, 1500, 50, 50, 10.0)]
    rows = [[*row(case, one(case)), "", "", ""] for case in cases]
    case, inside = Case(most, 1500, groups, groups, 10.0), Case(0, 1500, groups // 4, groups // 4, 10.0, counted=True)
    found = one(case)
    kb = [open_kb(case, found, "controller"), open_kb(case, found), open_kb(inside, one(inside))]
    columns = ["workers", "tokens an episode", "episodes open", "s until a generator answers"]
    columns += ["ms of CPU a turn: all workers", "controller", "buffer", "turns/s, a core each", "turns/s here"]
    columns += ["kB an open episode: controller, resident", "all processes, resident", "counted"]
    about = (
        f"Episodes of {TURNS} turns, groups of {GROUP_SIZE}. 'A core each' is on paper: the least of workers, "
        "controller and buffer, each with a core of its own, from the CPU time measured here. 'Here' all processes "
        "share this machine's cores, the simulated generators included. An open episode is at its last turn or the one "
        "before; resident is the growth of all processes but the generators, counted what Python has allocated for it "
        "in one process."
    )
    return [*table(columns, [*rows, [*row(case, found), *kb]]), "", about]


if __name__ == "__main__":
    main("Rollout workers", measure, workers=[1, 4], groups=400, open=10_000)
