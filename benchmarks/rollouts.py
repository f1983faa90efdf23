"""Measure the capacity of a run in turns per second: rollout workers, controller and buffer, for any number of hosts.

Everything is real except the generators, the trainer and the work of tools. Workers, in their own processes, render,
sample, parse, score, record and pack episodes of ten turns, in groups of 8. The controller issues tickets, keeps
statistics and polls every worker once a second. CPU time is measured for each process. 'A core each' is computed from
it: the highest rate at which each worker, the controller and the buffer need no more than a core of their own. 'Here'
is measured, with all processes on this machine's cores, the simulated generators included.

Memory of an open episode is the growth of workers, controller and buffer until the first episode ends. All episodes are
then in their last or second-to-last turn.

The second table is computed from these costs, with 8 workers a host, a core each, and 10 s until a generator answers.
Where polling the workers would take all of the controller's time, no turn is played.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import forge_env as fe
from benchmarks.frame import apart, main, table
from forge_env.config import RunConfig
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.policy import NO_TOKENS
from forge_env.run import Run, RunFolder
from forge_env.types import Message
from trainers.actors.actor import ForgeActor, concurrent_endpoint
from trainers.actors.processes import settle_heap
from trainers.actors.remote import result
from trainers.algorithms.grpo import Weighing
from trainers.buffer.actor import RemoteReplayBuffer, ReplayBuffer
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings
from trainers.generator.client import Member
from trainers.generator.types import Completion, SamplingOptions
from trainers.loop.stack import prepare_controller
from trainers.rollout.local import WorkerSettings
from trainers.rollout.rollouts import Crew, Rollouts
from trainers.rollout.types import Links

TURNS, GROUP_SIZE, GENERATORS = 10, 8, 2
WORKERS_A_HOST, GENERATE_S = 8, 10.0
CALLS, AT_ONCE = 4000, 50
NEWEST = 1 << 20
"""Policy version of every token; the buffer treats unknown versions as the newest that it knows."""
LETTERS = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=20_000))
"""Text with about one token per letter, for any tokenizer."""


class ChatterConfig(ToolEnvironmentConfig):
    told: int = 60
    """Characters of every tool result."""


class Chatter(fe.ToolEnvironment):
    """Conversation with a tool that does nothing."""

    config_class = ChatterConfig
    config: ChatterConfig
    splits = ("train", "eval")
    rubric = fe.Rubric(lambda task, completion: float(hash(completion) % 2))

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt=f"Conversation {index}: begin.")

    def demonstrate(self, task: fe.Task, rng: random.Random) -> list[Message]:
        return [*self.prompt(task), Message(role="assistant", content=f"{rng.random()}")]

    @fe.tool
    async def note(self, text: str) -> str:
        """Take a note."""
        return LETTERS[: self.config.told]


def reply(length: int) -> str:
    """Return an assistant message with `length` letters and a call of the tool."""
    call = json.dumps({"name": "note", "arguments": {"text": "as above"}})
    return f"{LETTERS[:length]}\n<tool_call>\n{call}\n</tool_call><|im_end|>"


class SimulatedGenerator(ForgeActor):
    """Generator that answers every request with the same tokens after a delay."""

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
    """One measurement: worker processes, tokens of an episode, groups, groups at once, and a generator's seconds."""

    workers: int
    tokens: int
    groups: int
    open: int
    latency_s: float


@dataclass
class Measured:
    """Results of a case: CPU seconds by process, and memory growth in MB until the first episode ended, by process."""

    turns: int
    wall_s: float
    cpu_s: dict[str, float]
    grown_mb: dict[str, float]

    def per_turn(self, role: str) -> float:
        """Return CPU seconds per turn, summed over the processes of a role."""
        return sum(seconds for name, seconds in self.cpu_s.items() if name.startswith(role)) / self.turns


def cpu_s(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def memory_mb(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    return {name: process.memory_info().rss / 1e6 for name, process in processes.items()}


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
            "rollouts": {"workers": case.workers},
            "sandbox": {"engine": "local", "concurrency": case.workers},
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
        crew = Crew(
            [WorkerSettings(number, config, run.folder.root, model, Weighing) for number in range(case.workers)]
        )
        await crew.start()
        try:
            rollouts = Rollouts(run, environment, crew)
            members = [Member(number, 1, actors[number], True) for number in range(GENERATORS)]
            await rollouts.connect(Links(members, buffer))
            pids = {"controller": os.getpid(), "buffer": actors[-1]._forge_pids[0]}
            pids |= {f"worker{each.number}": each.actor._forge_pids[0] for each in crew.replicas}
            processes = {name: psutil.Process(pid) for name, pid in pids.items()}
            return await play_groups(case, rollouts, buffer, processes)
        finally:
            await crew.close()
            await crew.stop()
    finally:
        for actor in actors:
            await SimulatedGenerator.shutdown(actor)
        run.close()
        run.folder.release()


async def play_groups(
    case: Case, rollouts: Rollouts, buffer: LocalReplayBuffer[Any], processes: Mapping[str, psutil.Process]
) -> Measured:
    """Play all groups and measure from the first ticket to the last step."""
    before, began, empty = cpu_s(processes), time.perf_counter(), memory_mb(processes)
    largest = empty

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
                largest = max(largest, memory_mb(processes), key=lambda memory: sum(memory.values()))

    async with asyncio.TaskGroup() as group:
        background = [group.create_task(generate()), group.create_task(look())]
        for step in range(-(-case.groups // case.open)):
            await buffer.reserve(step)
            await buffer.release(step + 1)
        wall = time.perf_counter() - began
        spent = {name: seconds - before[name] for name, seconds in cpu_s(processes).items()}
        for task in background:
            task.cancel()
    totals = rollouts.totals
    assert not totals.episodes_invalid + totals.episodes_late, totals
    grown = {name: largest[name] - empty[name] for name in empty}
    return Measured(case.groups * GROUP_SIZE * TURNS, wall, spent, grown)


async def played(case: dict[str, Any]) -> dict[str, Any]:
    prepare_controller()
    with tempfile.TemporaryDirectory() as scratch:
        return asdict(await play(Case(**case), Path(scratch)))


async def cost_of_a_call() -> float:
    """Return the CPU seconds of a small actor call in this process."""
    actor = await SimulatedGenerator.options(mesh_name="called").as_actor([1], 0.0)

    async def some(count: int) -> None:
        for _ in range(count):
            await result(actor.process_id.call_one())

    try:
        await some(AT_ONCE)
        before = time.process_time()
        await asyncio.gather(*(some(CALLS // AT_ONCE) for _ in range(AT_ONCE)))
        return (time.process_time() - before) / CALLS
    finally:
        await SimulatedGenerator.shutdown(actor)


def row(case: Case, measured: Measured, memory: bool) -> list[object]:
    """Return one line of the table, with the memory of open episodes or without."""
    worker, controller, buffer = (measured.per_turn(role) for role in ("worker", "controller", "buffer"))
    kb = [measured.grown_mb["controller"], sum(measured.grown_mb.values())] if memory else []
    return [
        case.workers,
        case.tokens,
        case.open * GROUP_SIZE,
        case.latency_s,
        *(f"{seconds * 1e3:.3f}" for seconds in (worker, controller, buffer)),
        f"{min(1 / buffer, 1 / controller, case.workers / worker):.0f}",
        f"{measured.turns / measured.wall_s:.0f}",
        *([f"{each * 1e3 / (case.open * GROUP_SIZE):.1f}" for each in kb] or ["", ""]),
    ]


def scale(measured: Measured, call_s: float) -> list[list[object]]:
    """Return the load of each part on many hosts: every open episode has a turn each time a generator answers."""
    worker, controller, buffer = (measured.per_turn(role) for role in ("worker", "controller", "buffer"))
    rows: list[list[object]] = []
    for hosts, look_s in ((10, 1), (100, 1), (1000, 1), (1000, 10)):
        for episodes in (10_000, 100_000):
            looking, turns_s = hosts * WORKERS_A_HOST * call_s / look_s, episodes / GENERATE_S
            turns_s *= looking < 1
            loads = [looking + turns_s * controller, turns_s * buffer, turns_s * worker / (hosts * WORKERS_A_HOST)]
            rows.append([hosts, f"{episodes:,}", look_s, f"{turns_s:.0f}", *(f"{load:.1%}" for load in loads)])
    return rows


def measure(args: argparse.Namespace) -> list[str]:
    most, groups = args.workers[-1], args.open // GROUP_SIZE
    cases = [Case(workers, 1500, args.groups, 50, 0.05) for workers in args.workers]
    cases += [Case(most, 9000, args.groups // 4, 50, 0.05), Case(most, 1500, groups, groups, GENERATE_S)]
    taken = [Measured(**apart("benchmarks.rollouts:played", asdict(case))) for case in cases]
    columns = ["workers", "tokens an episode", "episodes open", "s until a generator answers"]
    columns += ["ms of CPU a turn: all workers", "controller", "buffer", "turns/s, a core each", "turns/s here"]
    columns += ["kB an open episode: controller", "all processes"]
    rows = [row(case, each, case is cases[-1]) for case, each in zip(cases, taken, strict=True)]
    loads = ["turns/s", "controller busy", "buffer busy", "workers busy"]
    call_s = apart("benchmarks.rollouts:cost_of_a_call")
    hosts = table(["hosts", "episodes open", "poll interval, s", *loads], scale(taken[len(args.workers) - 1], call_s))
    return [*table(columns, rows), "", *hosts, "", f"Polling a worker costs the controller {call_s * 1e3:.2f} ms."]


if __name__ == "__main__":
    main("Rollout workers", measure, workers=[1, 4], groups=400, open=10_000)
