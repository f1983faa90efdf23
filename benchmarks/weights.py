"""Weight sync: from the trainer's push to tensors in the generator, against copying the same bytes once.

python -m benchmarks weights --megabytes 3.5 1024 --repeats 5

Two processes and the weight store between them, as in a run. The peers in the same run are one `memcpy` of the
bytes, and TorchStore given the tensors one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from trainers.loop.stack import prepare_controller

TENSORS = 46
"""As many as the default recipe's model has."""


def tensors(megabytes: float) -> dict[str, Any]:
    """A state dict of that size in float32: a few large matrices, many small ones."""
    import torch

    elements = int(megabytes * 2**20 / 4)
    sizes = [elements // 2 // 6] * 6 + [max(elements // 2 // (TENSORS - 6), 1)] * (TENSORS - 6)
    return {f"layers.{number}.weight": torch.randn(size) for number, size in enumerate(sizes)}


def memcpy_s(state: dict[str, Any]) -> float:
    """Seconds to copy every tensor once."""
    started = time.perf_counter()
    for tensor in state.values():
        tensor.clone()
    return time.perf_counter() - started


async def measure(megabytes: float, repeats: int) -> dict[str, list[float]]:
    """Seconds of every way, `repeats` times."""
    import torchstore

    from benchmarks.weights_receiver import Receiver
    from trainers.weights.store import WeightStore

    state = tensors(megabytes)
    store = WeightStore()
    await store.open()
    receiver = await Receiver.as_actor()
    times: dict[str, list[float]] = {"push": [], "pull": [], "sync": [], "memcpy": [], "tensor by tensor": []}
    try:
        for version in range(1, repeats + 2):
            started = time.perf_counter()
            await store.push(state, version)
            pushed = time.perf_counter()
            await receiver.pull.call_one(version)
            pulled = time.perf_counter()
            if version > 1:
                await store.drop(version - 1)
            single = time.perf_counter()
            for name, tensor in state.items():
                await torchstore.put(f"single/{name}", tensor)
            await receiver.pull_one_by_one.call_one([f"single/{name}" for name in state])
            ended = time.perf_counter()
            if version == 1:  # the first allocates shared memory and imports
                continue
            times["push"].append(pushed - started)
            times["pull"].append(pulled - pushed)
            times["sync"].append(pulled - started)
            times["tensor by tensor"].append(ended - single)
            times["memcpy"].append(memcpy_s(state))
    finally:
        await Receiver.shutdown(receiver)
        await store.close()
    return times


def main() -> None:
    """Measure every size, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[3.5, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help="rows without the table's head")
    args = parser.parse_args()
    prepare_controller()
    if not args.bare:
        print("| size | push ms | pull ms | together | against memcpy | TorchStore tensor by tensor |")
        print("|---|---|---|---|---|---|", flush=True)
    for megabytes in args.megabytes:
        if len(args.megabytes) > 1:  # a store holds one model's layout, so every size has a process of its own
            command = [sys.executable, "-m", "benchmarks.weights", "--megabytes", str(megabytes)]
            command += ["--repeats", str(args.repeats), "--bare"]
            subprocess.run(command, check=True)
            continue
        times = asyncio.run(measure(megabytes, args.repeats))
        ms = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        print(
            f"| {megabytes:g} MB | {ms['push']:.1f} | {ms['pull']:.1f} | {ms['sync']:.1f} | "
            f"{ms['sync'] / ms['memcpy']:.1f}x | {ms['tensor by tensor']:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
