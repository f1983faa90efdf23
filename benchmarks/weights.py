"""Measure weight sync: from the trainer's push until the generator has copied every tensor into its model.

On one host and between two, relative to one copy of the same bytes.

python -m benchmarks weights --megabytes 3.5 1024 --repeats 5 [--hosts 2] [--record]

As in a run, there are two processes, and one sends the other the location of its weights. Compared in the same run:
both values of `weights.transport`, TorchStore with each tensor put separately, and one copy of the bytes: `memcpy` on
one host; between two, a TCP connection into memory that was allocated before. The two hosts are workers
(`forge-env worker`) at loopback addresses of this machine, for root in separate namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import record, spread, table
from trainers.loop.stack import prepare_controller

TRANSPORTS = ("shared", "torchstore")
PLACE = {"trainer": [0], "generator": [1]}
"""Host index of each role."""
TENSORS = 46
"""Number of tensors in the default recipe's model."""


def tensors(megabytes: float) -> dict[str, Any]:
    """Make a state dict of this size in float32: a few large matrices, many small ones."""
    import torch

    elements = int(megabytes * 2**20 / 4)
    sizes = [elements // 2 // 6] * 6 + [max(elements // 2 // (TENSORS - 6), 1)] * (TENSORS - 6)
    return {f"layers.{number}.weight": torch.randn(size) for number, size in enumerate(sizes)}


@asynccontextmanager
async def grounds(workers_at: Sequence[str], folder: str) -> AsyncIterator[tuple[Any, Any]]:
    """Hosts of the sender and of the receiver; without workers both are on this machine."""
    if not workers_at:
        yield None, None
        return
    from forge_env.config import load_config
    from forge_env.job.survey import survey
    from forge_env.run import Run, RunFolder
    from trainers.actors.hosts import Hosts

    job = ["job.kind=hosts", f"job.workers={json.dumps(workers_at)}", f"job.place={json.dumps(PLACE)}"]
    config = load_config("coding_rlvr", [*job, f"output_dir={folder}", f"model.cache_dir={folder}/cache"])
    run_folder = RunFolder(Path(folder, "run"))
    run_folder.create()
    surveyed = await survey(config, run_folder.root)
    assert surveyed is not None
    hosts = Hosts(Run(config, run_folder), surveyed)
    await hosts.open()
    try:
        yield await hosts.ground("trainer"), await hosts.ground("generator0")
    finally:
        await hosts.close()
        run_folder.release()


async def measure(megabytes: float, repeats: int, workers_at: Sequence[str], folder: str) -> dict[str, list[float]]:
    """Return the seconds of each stage, `repeats` values each."""
    from benchmarks.weights_peers import Receiver, Sender
    from trainers.actors.processes import survive_deaths
    from trainers.actors.remote import result
    from trainers.weights.store import close_store, open_store

    survive_deaths()
    times: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    async with grounds(workers_at, folder) as (near, far):
        senders = {kind: await Sender.options(mesh_name=kind, ground=near).as_actor(1, kind) for kind in TRANSPORTS}
        receiver = await Receiver.options(ground=far).as_actor(1)
        shared, torchstore = senders.values()
        try:
            await open_store(torchstore._forge_proc_mesh, 1)
            for sender in senders.values():
                await result(sender.prepare.call_one(megabytes))
            for version in range(repeats + 1):
                if version == 1:  # the first version also allocates memory and imports modules
                    times.clear()
                for kind, sender in senders.items():
                    published, push_s = await result(sender.push.call_one(version))
                    started = time.perf_counter()
                    await result(receiver.pull.call_one(published))
                    pull_s = time.perf_counter() - started
                    add(f"{kind} push", push_s)
                    add(f"{kind} pull", pull_s)
                    add(kind, push_s + pull_s)
                started = time.perf_counter()
                keys = await result(torchstore.put_one_by_one.call_one())
                await result(receiver.pull_one_by_one.call_one(keys))
                add("tensor by tensor", time.perf_counter() - started)
                if near is None:
                    add("memcpy", await result(shared.memcpy.call_one()))
                else:
                    count = int(megabytes * 2**20)
                    port = await result(shared.serve.call_one(near.address, count))
                    add("TCP copy", await result(receiver.copy.call_one(near.address, port, count)))
        finally:
            for actor in (receiver, *senders.values()):
                await Receiver.shutdown(actor)
            await close_store()
    return times


def measured(hosts: int, megabytes: float, repeats: int) -> dict[str, list[float]]:
    """Run `measure` in a process of its own, so that sizes don't share memory."""
    from tests.trainers.actors.workers import workers

    with tempfile.TemporaryDirectory(prefix="fe-") as folder, workers(hosts if hosts > 1 else 0, Path(folder)) as there:
        request = json.dumps([megabytes, repeats, [host.address for host in there], folder])
        command = [sys.executable, "-m", "benchmarks.weights", "--measure", request]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    times: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return times


def main() -> None:
    """Measure every size on one host and on two, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[3.5, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hosts", type=int, nargs="+", choices=[1, 2], default=[1, 2])
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    prepare_controller()
    if args.measure is not None:
        print(json.dumps(asyncio.run(measure(*args.measure))))
        return
    rows = []
    for hosts, megabytes in ((hosts, megabytes) for hosts in args.hosts for megabytes in args.megabytes):
        times = measured(hosts, megabytes, args.repeats)
        ms = {name: [value * 1e3 for value in values] for name, values in times.items()}
        floor = "memcpy" if hosts == 1 else "TCP copy"
        for way in (*TRANSPORTS, "tensor by tensor", floor):
            stages = [spread(ms[name]) if (name := f"{way} {stage}") in ms else "" for stage in ("push", "pull")]
            of_floor = statistics.median(ms[way]) / statistics.median(ms[floor])
            rows.append([hosts, f"{megabytes:g} MB", way, *stages, spread(ms[way]), f"{of_floor:.1f}"])
            print(rows[-1], flush=True)
    lines = [
        *table(["hosts", "size", "way", "push ms", "pull ms", "together ms", "times one copy"], rows),
        "",
        "One copy is `memcpy` on one host, and a TCP connection between two. Aims for `shared` and large weights: at "
        "most 4 on one host, at most 3 between two. For small ones the two calls take longer than the bytes. "
        f"Load of the machine at the end {' '.join(f'{value:.1f}' for value in os.getloadavg())}.",
    ]
    print("\n".join(lines))
    if args.record:
        record("weights", "Weight sync", "make bench ARGS='weights --record'", lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
