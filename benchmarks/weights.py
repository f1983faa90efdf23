"""Measure weight sync, from the trainer's push until the generator has copied every tensor into its model, relative to
one copy of the same bytes.

python -m benchmarks weights --megabytes 3.5 1024 --repeats 5

As in a run, there are two processes: one sends the other the location of its weights, and the store's index is updated
in the meantime. Compared in the same run: one `memcpy` of the bytes into allocated memory, and TorchStore with each
tensor put separately.
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
    import torchstore

    from benchmarks.weights_peers import Receiver
    from trainers.model.parts import Part
    from trainers.weights.store import Keeper, WeightStore

    state = tensors(megabytes)
    copies = {name: tensor.clone() for name, tensor in state.items()}
    store = WeightStore()
    keeper = await Keeper.options(mesh_name="weights").launch()
    await store.open(keeper)
    receiver = await Receiver.as_actor()
    times: dict[str, list[float]] = {"push": [], "pull": [], "sync": [], "memcpy": [], "tensor by tensor": []}
    try:
        for version in range(1, repeats + 2):
            started = time.perf_counter()
            published = store.publish([store.snapshot(Part.all_of(state))])
            entering = asyncio.create_task(store.put(published, version))
            pushed = time.perf_counter()
            await receiver.pull.call_one(published)
            pulled = time.perf_counter()
            await entering
            if version > 1:
                await store.drop(version - 1)
            single = time.perf_counter()
            for name, tensor in state.items():
                await torchstore.put(f"single/{name}", tensor)
            await receiver.pull_one_by_one.call_one([f"single/{name}" for name in state])
            ended = time.perf_counter()
            if version == 1:  # the first version also allocates shared memory and imports modules
                continue
            times["push"].append(pushed - started)
            times["pull"].append(pulled - pushed)
            times["sync"].append(pulled - started)
            times["tensor by tensor"].append(ended - single)
            times["memcpy"].append(memcpy_s(state, copies))
    finally:
        await Receiver.shutdown(receiver)
        await store.close()
        await Keeper.shutdown(keeper)
    return times


def measured(megabytes: float, repeats: int) -> dict[str, list[float]]:
    """Run `measure` in its own process, because a store holds one model's layout."""
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
        ratio = statistics.median(ms["sync"]) / statistics.median(ms["memcpy"])
        ways = [spread(ms[name]) for name in ("push", "pull", "sync", "tensor by tensor", "memcpy")]
        rows.append([f"{megabytes:g} MB", *ways, f"{ratio:.1f}x"])
    columns = ["size", "push ms", "pull ms", "together ms", "TorchStore tensor by tensor ms", "memcpy ms", "of memcpy"]
    lines = table(columns, rows)
    print("\n".join(lines))
    record("weights", "Weight sync", "make bench ARGS=weights", lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
