"""What a run would do on many hosts: a simulation of its queues, with the costs that this machine measures.

python -m benchmarks scale

Measured first: the CPU time that a turn costs a worker and that a group costs the controller and the buffer
(`benchmarks.rollouts`, four workers), and that one call of a process costs whoever makes it. Then every open episode is
played by a simulation: its group waits for the controller, each of its turns for a generator (a constant time: there
are as many as are needed) and then for its worker, the finished group for the buffer. Controller, buffer and each
worker do one thing at a time, in order of arrival, and need what was measured. Besides, the controller looks at
every worker every so often.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import os
import time
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.report import DOCUMENT, record, table
from benchmarks.rollouts import GROUP_SIZE, TURNS, Case, one
from benchmarks.simulated import SimulatedGenerator
from trainers.actors.remote import result

WORKERS_A_HOST, GENERATE_S, ROUNDS = 8, 10.0, 3
SIZES = [
    *((10, episodes, 1.0) for episodes in (10_000, 100_000)),
    *((100, episodes, 1.0) for episodes in (10_000, 100_000)),
    *((1000, episodes, 1.0) for episodes in (10_000, 100_000)),
    *((1000, episodes, 10.0) for episodes in (10_000, 100_000)),
]
"""Hosts, episodes open, seconds from look to look."""
CALLS, AT_ONCE = 4000, 50


@dataclass(frozen=True)
class Costs:
    """Seconds of CPU: of a worker a turn, of controller and buffer a group, of the controller a call of a worker."""

    turn: float
    controller: float
    buffer: float
    call: float


class Played(NamedTuple):
    """Turns a second, shares of their time that they worked, and the mean time that a group waited for the two."""

    turns_s: float
    controller: float
    buffer: float
    workers: float
    waited_s: float

    def row(self) -> list[str]:
        """As cells."""
        shares = [f"{100 * share:.1f} %" for share in (self.controller, self.buffer, self.workers)]
        return [f"{self.turns_s:.0f}", *shares, f"{self.waited_s:.3g}"]


class Server:
    """Does one thing at a time, in order of arrival; `own` is the share of its time that something else takes."""

    def __init__(self, own: float = 0.0) -> None:
        self.free = self.busy = 0.0
        self._rate = 1.0 - own

    def done(self, now: float, seconds: float) -> float:
        """When work that arrives now is done."""
        seconds /= self._rate
        self.busy += seconds
        self.free = max(self.free, now) + seconds
        return self.free


def play(costs: Costs, hosts: int, episodes: int, look_s: float) -> Played:
    """Every place for a group plays `ROUNDS` groups, the first of which begin evenly over the time of one.

    Where looking at the workers takes all of the controller's time, nothing is played.
    """
    workers = [Server() for _ in range(hosts * WORKERS_A_HOST)]
    looking = len(workers) * costs.call / look_s
    if looking >= 1:
        return Played(0.0, looking, 0.0, 0.0, math.inf)
    controller, buffer = Server(looking), Server()
    groups, waited, last = episodes // GROUP_SIZE, 0.0, 0.0
    began = [TURNS * GENERATE_S * place / groups for place in range(groups)]
    events = [(began[place], place, 0) for place in range(groups)]  # when, which place, turns begun by then
    heapq.heapify(events)
    under_way = [0] * groups
    while events:
        now, place, turn = heapq.heappop(events)
        worker = workers[place % len(workers)]
        if turn % (TURNS + 1) == 0:  # a ticket
            at = controller.done(now, costs.controller)
            waited += at - now
            under_way[place] = GROUP_SIZE
            for _ in range(GROUP_SIZE):
                heapq.heappush(events, (at + GENERATE_S, place, turn + 1))
            continue
        at = worker.done(now, costs.turn)
        if turn % (TURNS + 1) < TURNS:
            heapq.heappush(events, (at + GENERATE_S, place, turn + 1))
            continue
        under_way[place] -= 1
        if not under_way[place]:
            last = buffer.done(at, costs.buffer)
            waited += last - at
            if turn + 1 < ROUNDS * (TURNS + 1):
                heapq.heappush(events, (last, place, turn + 1))
    count, span = groups * ROUNDS, last - TURNS * GENERATE_S  # the first and the last ones have it to themselves
    mean = sum(worker.busy for worker in workers) / len(workers) / span
    busy = looking + controller.busy * (1 - looking) / span
    return Played(count * GROUP_SIZE * TURNS / span, busy, buffer.busy / span, mean, waited / count)


async def cost_of_a_call() -> float:
    """CPU seconds that a small call costs this process."""
    actor = await SimulatedGenerator.options(mesh_name="called").as_actor([1], 0.0)

    async def some(count: int) -> None:
        for _ in range(count):
            await result(actor.process_id.call_one())

    try:
        await some(AT_ONCE)
        before = time.process_time()
        async with asyncio.TaskGroup() as calling:
            for _ in range(AT_ONCE):
                calling.create_task(some(CALLS // AT_ONCE))
        return (time.process_time() - before) / CALLS
    finally:
        await SimulatedGenerator.shutdown(actor)


def measure(groups: int) -> Costs:
    """The costs on this machine."""
    found = one(Case(4, 1500, groups, 50, 0.05))
    group = TURNS * GROUP_SIZE
    return Costs(
        found.per_turn("worker"),
        found.per_turn("controller") * group,
        found.per_turn("buffer") * group,
        asyncio.run(cost_of_a_call()),
    )


def main() -> None:
    """Measure, simulate, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--record", action="store_true", help="write the table to docs/scale.md")
    args = parser.parse_args()
    costs = measure(args.groups)
    rows = [
        [hosts, f"{episodes:,}", look_s, *play(costs, hosts, episodes, look_s).row()]
        for hosts, episodes, look_s in SIZES
    ]
    columns = [
        "hosts",
        "episodes open",
        "a look every s",
        "turns/s",
        "controller busy",
        "buffer busy",
        "workers busy",
        "wait a group, s",
    ]
    about = (
        f"Measured here: a turn costs a worker {costs.turn * 1e3:.2f} ms, a group of {GROUP_SIZE} episodes of {TURNS} "
        f"turns the controller {costs.controller * 1e3:.1f} ms and the buffer {costs.buffer * 1e3:.1f} ms, a call "
        f"{costs.call * 1e3:.2f} ms; load of the machine at the end {os.getloadavg()[0]:.1f}. Assumed: "
        f"{WORKERS_A_HOST} workers a host with a core each, {GENERATE_S:g} s until a generator answers, "
        "1,500 tokens an episode. Where "
        "looking at the workers would take all of the controller's time, no turn is played."
    )
    lines = [*table(columns, rows), "", about]
    print("\n".join(lines))
    if args.record:
        page = DOCUMENT.with_name("scale.md")
        record("scale", "The simulation", "make bench ARGS='scale --record'", lines, document=page)


if __name__ == "__main__":
    main()
