"""Simulate a run on many hosts: a queueing model with the costs measured on this machine.

python -m benchmarks scale [--groups 400] [--record]

Measured first: the CPU time of a turn in a worker, of a group in the controller and the buffer (`benchmarks.rollouts`,
four workers), and of one actor call in the calling process. Then every open episode is simulated: its group waits for
the controller, each of its turns for a generator (a constant time, since there are as many as needed) and then for its
worker, and the finished group for the buffer. Controller, buffer and workers each process one item at a time, in order
of arrival, at the measured costs. In addition, the controller polls every worker at a fixed interval.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import time
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.frame import apart, main, table
from benchmarks.rollouts import GROUP_SIZE, TURNS, Case, SimulatedGenerator, one
from trainers.actors.remote import result

WORKERS_A_HOST, GENERATE_S, ROUNDS = 8, 10.0, 3
SIZES = [
    (hosts, episodes, look_s)
    for hosts, look_s in ((10, 1.0), (100, 1.0), (1000, 1.0), (1000, 10.0))
    for episodes in (10_000, 100_000)
]
"""Hosts, open episodes, and seconds between two polls."""
CALLS, AT_ONCE = 4000, 50


@dataclass(frozen=True)
class Costs:
    """CPU seconds: of a worker per turn, of controller and buffer per group, of the controller per call of a worker."""

    turn: float
    controller: float
    buffer: float
    call: float


class Played(NamedTuple):
    """Result: turns per second, utilisations, and the mean seconds that a group waited for controller and buffer."""

    turns_s: float
    controller: float
    buffer: float
    workers: float
    waited_s: float

    def row(self) -> list[str]:
        """Format the result as table cells."""
        shares = [f"{100 * share:.1f} %" for share in (self.controller, self.buffer, self.workers)]
        return [f"{self.turns_s:.0f}", *shares, f"{self.waited_s:.3g}"]


class Server:
    """Server of a queue: one item at a time, in order of arrival; `own` is the share of time used for other work."""

    def __init__(self, own: float = 0.0) -> None:
        self.free = self.busy = 0.0
        self._rate = 1.0 - own

    def done(self, now: float, seconds: float) -> float:
        """Queue work that arrives at `now` and return its completion time."""
        seconds /= self._rate
        self.busy += seconds
        self.free = max(self.free, now) + seconds
        return self.free


def play(costs: Costs, hosts: int, episodes: int, look_s: float) -> Played:
    """Simulate `ROUNDS` groups in every slot; the first groups start evenly spread over the duration of one group.

    If polling the workers takes all of the controller's time, no turns are played.
    """
    workers = [Server() for _ in range(hosts * WORKERS_A_HOST)]
    looking = len(workers) * costs.call / look_s
    if looking >= 1:
        return Played(0.0, looking, 0.0, 0.0, math.inf)
    controller, buffer = Server(looking), Server()
    groups, waited, last = episodes // GROUP_SIZE, 0.0, 0.0
    began = [TURNS * GENERATE_S * slot / groups for slot in range(groups)]
    events = [(began[slot], slot, 0) for slot in range(groups)]  # time, slot, turns begun so far
    heapq.heapify(events)
    episodes_left = [0] * groups
    while events:
        now, slot, turn = heapq.heappop(events)
        worker = workers[slot % len(workers)]
        if turn % (TURNS + 1) == 0:  # the group requests a ticket
            at = controller.done(now, costs.controller)
            waited += at - now
            episodes_left[slot] = GROUP_SIZE
            for _ in range(GROUP_SIZE):
                heapq.heappush(events, (at + GENERATE_S, slot, turn + 1))
            continue
        at = worker.done(now, costs.turn)
        if turn % (TURNS + 1) < TURNS:
            heapq.heappush(events, (at + GENERATE_S, slot, turn + 1))
            continue
        episodes_left[slot] -= 1
        if not episodes_left[slot]:
            last = buffer.done(at, costs.buffer)
            waited += last - at
            if turn + 1 < ROUNDS * (TURNS + 1):
                heapq.heappush(events, (last, slot, turn + 1))
    count, span = groups * ROUNDS, last - TURNS * GENERATE_S  # excludes ramp-up and ramp-down
    mean = sum(worker.busy for worker in workers) / len(workers) / span
    busy = looking + controller.busy * (1 - looking) / span
    return Played(count * GROUP_SIZE * TURNS / span, busy, buffer.busy / span, mean, waited / count)


async def cost_of_a_call() -> float:
    """Return the CPU seconds of a small actor call in this process."""
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


def costs_here(groups: int) -> Costs:
    """Measure the costs on this machine."""
    measured = one(Case(4, 1500, groups, 50, 0.05))
    group = TURNS * GROUP_SIZE
    turn, controller, buffer = (measured.per_turn(role) for role in ("worker", "controller", "buffer"))
    return Costs(turn, controller * group, buffer * group, apart("benchmarks.scale:cost_of_a_call"))


def measure(args: argparse.Namespace) -> list[str]:
    costs = costs_here(args.groups)
    rows = [[size[0], f"{size[1]:,}", size[2], *play(costs, *size).row()] for size in SIZES]
    shares = ["controller busy", "buffer busy", "workers busy"]
    about = (
        f"Measured here: a turn costs a worker {costs.turn * 1e3:.2f} ms, a group of {GROUP_SIZE} episodes of {TURNS} "
        f"turns the controller {costs.controller * 1e3:.1f} ms and the buffer {costs.buffer * 1e3:.1f} ms, a call "
        f"{costs.call * 1e3:.2f} ms. Assumed: {WORKERS_A_HOST} workers a host with a core each, {GENERATE_S:g} s until "
        "a generator answers, 1,500 tokens an episode. Where looking at the workers would take all of the "
        "controller's time, no turn is played."
    )
    columns = ["hosts", "episodes open", "a look every s", "turns/s", *shares, "wait a group, s"]
    return [*table(columns, rows), "", about]


if __name__ == "__main__":
    main("Simulated scale", measure, groups=400)
