"""How many turns one run can carry: rollout workers, controller and replay buffer, against simulated generators.

python -m benchmarks rollouts --workers 1 4 --groups 400

Everything but the generators, the trainer and the tools' work is real: episodes of ten turns are rendered, sampled,
parsed, scored, recorded, packed and added to the buffer by workers, in processes of their own; the controller hands out
tickets, keeps the books and looks at every worker once a second; a trainer that trains at once takes batch after batch.
What is measured is the CPU time of each process: a worker carries 1 / (its CPU time a turn) turns a second where it has
a core, and a run as many as its workers together, unless the controller or the buffer has less. The first row has a
worker in the controller's own process, which is how runs were before there were workers.

With `--open N`, so many episodes are under way at once, for the memory of each, wherever it is held: what workers,
controller and buffer have grown by until the first of them ends, when all are at their last turn or the one before.
Their generators take longer to answer, and workers that wait between turns find their caches cold: what a turn costs
them is to be compared with that of few episodes with the same generators.
Counted is what Python has allocated by then in one process that is worker and controller in one, with a quarter of
the episodes.
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
from trainers.buffer.types import BufferSettings  # noqa: E402
from trainers.generator.client import Member  # noqa: E402
from trainers.rollout.crew import Crew  # noqa: E402
from trainers.rollout.local import LocalWorker, WorkerSettings  # noqa: E402
from trainers.rollout.rollouts import Rollouts  # noqa: E402
from trainers.rollout.types import Links  # noqa: E402

TURNS, GROUP_SIZE, GENERATORS = 10, 8, 2
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        workers: processes that play; 0: the controller plays by itself.
        tokens: of an episode, about.
        groups: that are played.
        open: groups under way at once.
        latency_s: of a generator's answer.
        counted: whether Python's allocations are counted, which takes twice the time.
    """

    workers: int
    tokens: int
    groups: int
    open: int
    latency_s: float
    counted: bool = False


@dataclass
class Measured:
    """What came of it: CPU seconds, and by how many megabytes memory grew until the first episode ended, by process."""

    turns: int
    tokens: float
    wall_s: float
    cpu_s: dict[str, float]
    grown_mb: dict[str, float]

    def per_turn(self, role: str) -> float:
        """Seconds of CPU a turn, of all processes of a role."""
        spent = sum(seconds for name, seconds in self.cpu_s.items() if name.startswith(role))
        return spent / self.turns


class Within:
    """A worker in this process."""

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
        """Nothing is remembered."""

    async def close(self) -> list[Any]:
        """See `Crew`."""
        return [await self._worker.close()]

    async def stop(self) -> None:
        """It ends with this process."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def memory_mb(case: Case, pids: Mapping[str, int]) -> dict[str, float]:
    """Memory of each process, MB: resident, or what Python has allocated in this one."""
    if case.counted:
        return {"controller": tracemalloc.get_traced_memory()[0] / 1e6}
    pages = {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for name, pid in pids.items()}
    return {name: count * os.sysconf("SC_PAGE_SIZE") / 1e6 for name, count in pages.items()}


async def play(case: Case, scratch: Path) -> Measured:
    """Play the groups of a case."""
    import forge_env as fe
    from benchmarks.simulated import SimulatedGenerator, reply
    from trainers.model.chat import Chat
    from trainers.model.tiny import build_tiny_folder

    told = case.tokens // 2 // TURNS - 15  # and what the chat format adds
    config = RunConfig.model_validate(
        {
            "environment": {"name": "benchmarks.simulated:Chatter", "options": {"told": told, "max_turns": TURNS}},
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
    token_ids = Chat.of(model, config.model).tokenizer.encode(reply(told))
    run = Run(config, RunFolder(scratch / "run"))
    run.folder.create()
    actors = []
    try:
        for number in range(GENERATORS):
            placed = SimulatedGenerator.options(mesh_name=f"generator{number}")
            actors.append(await placed.as_actor(token_ids, case.latency_s))
        settings = BufferSettings(case.open, 0, steps=-(-case.groups // case.open))
        actors.append(await ReplayBuffer.options(mesh_name="buffer").as_actor(settings))
        buffer: RemoteReplayBuffer[Any] = RemoteReplayBuffer(actors[-1])
        made = [WorkerSettings(number, config, run.folder.root, model, Weighing) for number in range(case.workers or 1)]
        crew: Any = Crew(made) if case.workers else Within(made[0])
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


async def measure(case: Case, rollouts: Rollouts, buffer: RemoteReplayBuffer[Any], pids: Mapping[str, int]) -> Measured:
    """From the first ticket to the last step."""
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
        beside = [group.create_task(generate()), group.create_task(look())]
        for step in range(-(-case.groups // case.open)):
            await buffer.reserve(step)
            await buffer.release(step + 1)
        wall = time.perf_counter() - began
        spent = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
        for task in beside:
            task.cancel()
    totals = rollouts.totals
    assert not totals.episodes_invalid + totals.episodes_late, totals
    tokens = totals.tokens_generated / totals.episodes
    grown = {name: largest[name] - empty[name] for name in empty}
    return Measured(case.groups * GROUP_SIZE * TURNS, tokens, wall, spent, grown)


def one(case: Case) -> Measured:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "rollouts", "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def row(case: Case, found: Measured, counted: tuple[Case, Measured] | None = None) -> list[object]:
    """One line of the table; with the memory of open episodes where it was `counted` too."""
    controller, buffer = found.per_turn("controller"), found.per_turn("buffer")
    worker = found.per_turn("worker") if case.workers else controller
    limits = [1 / buffer, *([case.workers / worker, 1 / controller] if case.workers else [1 / controller])]
    own = f"{worker * 1e3:.2f}" if case.workers else "in the controller"
    measured = found.turns / found.wall_s
    return [
        case.workers or "none",
        case.tokens,
        case.open * GROUP_SIZE,
        case.latency_s,
        own,
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
    """Kilobytes of an open episode in the processes of a role."""
    grown = sum(megabytes for name, megabytes in found.grown_mb.items() if name.startswith(role))
    return f"{grown * 1e3 / (case.open * GROUP_SIZE):.1f}"


def main() -> None:
    """Measure every case, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--open", type=int, default=10_000)
    parser.add_argument("--record", action="store_true", help="write the table to docs/benchmarks.md")
    parser.add_argument("--case")
    args = parser.parse_args()
    if args.case:
        with tempfile.TemporaryDirectory() as scratch:
            found = asyncio.run(play(Case(**json.loads(args.case)), Path(scratch)))
        print(json.dumps(asdict(found)))
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
