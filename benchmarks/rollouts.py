"""Measure the capacity of a run in turns per second: rollout workers, controller, buffer, simulated generators.

python -m benchmarks rollouts --workers 1 4 --groups 400

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
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import record, table
from trainers.loop.stack import prepare_controller

prepare_controller()

from forge_env.config import RunConfig  # noqa: E402
from forge_env.run import Run, RunFolder  # noqa: E402
from trainers.algorithms.grpo import Weighing  # noqa: E402
from trainers.buffer.actor import RemoteReplayBuffer, ReplayBuffer  # noqa: E402
from trainers.buffer.local import LocalReplayBuffer  # noqa: E402
from trainers.buffer.types import BufferSettings  # noqa: E402
from trainers.generator.client import Member  # noqa: E402
from trainers.rollout.local import LocalWorker, WorkerSettings  # noqa: E402
from trainers.rollout.rollouts import Crew, Rollouts  # noqa: E402
from trainers.rollout.types import Links  # noqa: E402

TURNS, GROUP_SIZE, GENERATORS = 10, 8, 2
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


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

    async def start(self) -> None:
        await self._worker.setup()

    async def connect(self, links: Links) -> None:
        """See `Crew`."""
        await self._worker.connect(links)

    async def call(self, number: int, endpoint: str, request: Any) -> Any:
        """See `Crew`."""
        return await getattr(self._worker, endpoint)(request)

    async def call_all(self, endpoint: str, /, *args: Any) -> list[Any]:
        """See `Crew`."""
        return [await getattr(self._worker, endpoint)(*args)]

    async def restore(self) -> None:
        """Do nothing: there is no state to restore."""

    async def close(self) -> list[Any]:
        """See `Crew`."""
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
    import forge_env as fe
    from benchmarks.simulated import SimulatedGenerator, reply
    from trainers.model.chat import Chat
    from trainers.model.tiny import build_tiny_folder

    tokens_per_message = case.tokens // 2 // TURNS - 15  # leaves room for the chat format
    config = RunConfig.model_validate(
        {
            "environment": {
                "name": "benchmarks.simulated:Chatter",
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
            return await measure(case, rollouts, buffer, pids)
        finally:
            await crew.close()
            await crew.stop()
    finally:
        for actor in actors:
            await SimulatedGenerator.shutdown(actor)
        run.close()
        run.folder.release()


async def measure(case: Case, rollouts: Rollouts, buffer: LocalReplayBuffer[Any], pids: Mapping[str, int]) -> Measured:
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


def one(case: Case) -> Measured:
    """Measure a case in its own process."""
    command = [sys.executable, "-m", "benchmarks", "rollouts", "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def row(case: Case, found: Measured, counted: tuple[Case, Measured] | None = None) -> list[object]:
    """Return one line of the table; `counted` adds the memory of open episodes."""
    controller, buffer = found.per_turn("controller"), found.per_turn("buffer")
    worker = found.per_turn("worker") if case.workers else controller
    limits = [1 / buffer, *([case.workers / worker, 1 / controller] if case.workers else [1 / controller])]
    worker_ms = f"{worker * 1e3:.2f}" if case.workers else "in the controller"
    measured = found.turns / found.wall_s
    return [
        case.workers or "none",
        case.tokens,
        case.open * GROUP_SIZE,
        case.latency_s,
        worker_ms,
        f"{controller * 1e3:.3f}",
        f"{buffer * 1e3:.3f}",
        f"{min(limits):.0f}",
        f"{measured:.0f}",
        *(
            ["", "", ""]
            if counted is None
            else [open_kb(case, found, "controller"), open_kb(case, found), open_kb(*counted)]
        ),
    ]


def open_kb(case: Case, found: Measured, role: str = "") -> str:
    """Return the kilobytes of an open episode in the processes of a role."""
    grown = sum(megabytes for name, megabytes in found.grown_mb.items() if name.startswith(role))
    return f"{grown * 1e3 / (case.open * GROUP_SIZE):.1f}"


def main() -> None:
    """Measure every case and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--open", type=int, default=10_000)
    parser.add_argument("--record", action="store_true", help="write the table to docs/benchmarks.md")
    parser.add_argument("--case")
    args = parser.parse_args()
    if args.case:
        with tempfile.TemporaryDirectory() as scratch:
            measured = asyncio.run(play(Case(**json.loads(args.case)), Path(scratch)))
        print(json.dumps(asdict(measured)))
        return
    cases = [Case(workers, 1500, args.groups, 50, 0.05) for workers in [0, *args.workers]]
    cases += [Case(workers, 9000, args.groups // 4, 50, 0.05) for workers in [0, args.workers[-1]]]
    cases += [Case(args.workers[-1], 1500, 50, 50, 10.0)] if args.open else []
    rows = [row(case, one(case)) for case in cases]
    if args.open:
        groups = args.open // GROUP_SIZE
        case, counted = (
            Case(args.workers[-1], 1500, groups, groups, 10.0),
            Case(0, 1500, groups // 4, groups // 4, 10.0, True),
        )
        rows.append(row(case, one(case), (counted, one(counted))))
    columns = [
        "workers",
        "tokens an episode",
        "episodes open",
        "s until a generator answers",
        "ms of CPU a turn: all workers",
        "controller",
        "buffer",
        "turns/s, a core each",
        "turns/s here",
        "kB an open episode: controller, resident",
        "all processes, resident",
        "counted",
    ]
    about = (
        f"Episodes of {TURNS} turns, groups of {GROUP_SIZE}. 'A core each' is on paper: the least of workers, "
        "controller and buffer, each with a core of its own, from the CPU time measured here. 'Here' all processes "
        "share this machine's cores, the simulated generators included. An open episode is at its last turn or the one "
        "before; resident is the growth of all processes but the generators, counted what Python has allocated for it "
        f"in one process. Load at the end {' '.join(f'{load:.1f}' for load in os.getloadavg())}."
    )
    lines = [*table(columns, rows), "", about]
    print("\n".join(lines))
    if args.record:
        record("rollouts", "Rollout workers", "make bench ARGS='rollouts --record'", lines)


if __name__ == "__main__":
    main()
