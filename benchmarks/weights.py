"""Measure weight sync, from the trainer's push until the generator has copied every tensor into its model, relative to
one copy of the same bytes.

python -m benchmarks weights --megabytes 3.5 1024 --repeats 5

As in a run, there are two processes, and one sends the other the location of its weights. Compared in the same run:
both values of `weights.transport`, TorchStore with each tensor put separately, and one `memcpy` of the bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.report import record, spread, table
from trainers.loop.stack import prepare_controller

TRANSPORTS = ("shared", "torchstore")
TENSORS = 46
"""Number of tensors in the default recipe's model."""


def tensors(megabytes: float) -> dict[str, Any]:
    """Make a state dict of this size in float32: a few large matrices, many small ones."""
    import torch

    elements = int(megabytes * 2**20 / 4)
    sizes = [elements // 2 // 6] * 6 + [max(elements // 2 // (TENSORS - 6), 1)] * (TENSORS - 6)
    return {f"layers.{number}.weight": torch.randn(size) for number, size in enumerate(sizes)}


def memcpy_s(state: dict[str, Any], own: dict[str, Any]) -> float:
    """Copy every tensor once into `own`; returns seconds."""
    started = time.perf_counter()
    for name, tensor in state.items():
        own[name].copy_(tensor)
    return time.perf_counter() - started


async def measure(megabytes: float, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each stage, `repeats` values each."""
    from benchmarks.weights_peers import Receiver, Sender
    from trainers.actors.remote import result
    from trainers.weights.store import close_store, open_store

    state = tensors(megabytes)
    copies = {name: tensor.clone() for name, tensor in state.items()}
    senders = {kind: await Sender.as_actor(1, kind) for kind in TRANSPORTS}
    receiver = await Receiver.as_actor(1)
    await open_store(senders["torchstore"]._forge_proc_mesh, 1)
    times: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    try:
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
            keys = await result(senders["torchstore"].put_one_by_one.call_one())
            await result(receiver.pull_one_by_one.call_one(keys))
            add("tensor by tensor", time.perf_counter() - started)
            add("memcpy", memcpy_s(state, copies))
    finally:
        for actor in (receiver, *senders.values()):
            await Receiver.shutdown(actor)
        await close_store()
    return times


def measured(megabytes: float, repeats: int) -> dict[str, list[float]]:
    """Run `measure` in a process of its own, so that sizes don't share memory."""
    command = [sys.executable, "-m", "benchmarks.weights", "--measure", str(megabytes), "--repeats", str(repeats)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    times: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return times


def main() -> None:
    """Measure every size and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[3.5, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    prepare_controller()
    if args.measure is not None:
        print(json.dumps(asyncio.run(measure(args.measure, args.repeats))))
        return
    rows = []
    for megabytes in args.megabytes:
        times = measured(megabytes, args.repeats)
        ms = {name: [value * 1e3 for value in values] for name, values in times.items()}
        floor = statistics.median(ms["memcpy"])
        for way in (*TRANSPORTS, "tensor by tensor", "memcpy"):
            stages = [spread(ms[name]) if (name := f"{way} {stage}") in ms else "" for stage in ("push", "pull")]
            rows.append(
                [f"{megabytes:g} MB", way, *stages, spread(ms[way]), f"{statistics.median(ms[way]) / floor:.1f}"]
            )
    columns = ["size", "way", "push ms", "pull ms", "together ms", "times memcpy"]
    lines = table(columns, rows)
    print("\n".join(lines))
    record("weights", "Weight sync", "make bench ARGS=weights", lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
