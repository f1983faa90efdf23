"""Measure weight sync: from the trainer's push until the generator has copied every tensor into its model.

As in a run, there are two processes, and one sends the other the location of its weights. Two hosts are workers
(`forge-env worker`) at loopback addresses of this machine; if root runs the benchmark, they are in separate namespaces.
`times one copy` divides by a `memcpy` on one host, and by a transfer over TCP into allocated memory between two. Aims
for `shared` and large weights: at most 4 on one host, at most 3 between two. For small weights, the two calls take
longer than the transfer.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.frame import apart, main, spread, table
from benchmarks.hosts import job
from tests.trainers.actors.workers import workers
from trainers.actors.actor import ForgeActor, endpoint
from trainers.loop.stack import prepare_controller
from trainers.model.parts import Part
from trainers.weights.reader import Reader
from trainers.weights.transport import Published
from trainers.weights.transport import Sender as WeightSender

TRANSPORTS = ("shared", "torchstore")
TENSORS = 46
"""Number of tensors in the default recipe's model: a few large matrices, many small ones."""


class Sender(ForgeActor):
    """Actor that pushes float32 weights like a trainer, and sends the same number of bytes over plain TCP."""

    def __init__(self, megabytes: float, transport: str) -> None:
        self._megabytes, self._transport = megabytes, transport

    @endpoint
    async def setup(self) -> None:
        torch.set_num_threads(1)
        kind = WeightSender
        if self._transport == "torchstore":
            from trainers.weights.store import StoreSender as kind
        self._sender = kind()
        elements = int(self._megabytes * 2**20 / 4)
        sizes = [elements // 2 // 6] * 6 + [max(elements // 2 // (TENSORS - 6), 1)] * (TENSORS - 6)
        self._state = {f"layers.{number}.weight": torch.randn(size) for number, size in enumerate(sizes)}
        self._copies: dict[str, torch.Tensor] = {}

    @endpoint
    async def memcpy(self) -> float:
        """Copy every tensor once within this process; returns seconds."""
        self._copies = self._copies or {name: tensor.clone() for name, tensor in self._state.items()}
        started = time.perf_counter()
        for name, tensor in self._state.items():
            self._copies[name].copy_(tensor)
        return time.perf_counter() - started

    @endpoint
    async def push(self, version: int) -> tuple[Published, float]:
        """Publish the weights like a trainer; returns their location, and the seconds until they can be read."""
        started = time.perf_counter()
        published = self._sender.publish([self._sender.snapshot(Part.all_of(self._state))])
        await self._sender.upload(version)
        return published, time.perf_counter() - started

    @endpoint
    async def put_one_by_one(self) -> list[str]:
        """Put every tensor into TorchStore separately; returns the keys."""
        import torchstore

        for name, tensor in self._state.items():
            await torchstore.put(f"single/{name}", tensor)
        return [f"single/{name}" for name in self._state]

    @endpoint
    async def serve(self, host: str, count: int) -> int:
        """Send `count` bytes to the next client that connects; returns the port."""
        listening, sent = socket.create_server((host, 0)), bytes(count)

        def send() -> None:
            connection, _ = listening.accept()
            with connection, listening:
                connection.sendall(sent)

        threading.Thread(target=send, daemon=True).start()
        return int(listening.getsockname()[1])


class Receiver(ForgeActor):
    """Actor that pulls weights like a generator."""

    @endpoint
    async def setup(self) -> None:
        torch.set_num_threads(1)
        self._reader, self._model = Reader(), dict[str, torch.Tensor]()

    @endpoint
    async def pull(self, published: Published) -> None:
        """Copy every tensor of a version into this process's tensors."""
        self._load(await self._reader.take(published))

    @endpoint
    async def pull_one_by_one(self, keys: list[str]) -> None:
        """Pull like `pull`, for tensors stored under separate keys."""
        import torchstore

        self._load([(key.removeprefix("single/"), await torchstore.get(key)) for key in keys])

    def _load(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name not in self._model:
                self._model[name] = tensor.clone()
            self._model[name].copy_(tensor)

    @endpoint
    async def copy(self, host: str, port: int, count: int) -> float:
        """Receive `count` bytes over TCP into allocated memory; returns seconds."""
        into = memoryview(bytearray(count))
        into[:] = bytes(count)
        started, got = time.perf_counter(), 0
        with socket.create_connection((host, port)) as connection:
            while got < count:
                got += connection.recv_into(into[got:])
        return time.perf_counter() - started


@asynccontextmanager
async def grounds(addresses: Sequence[str], folder: str) -> AsyncIterator[tuple[Any, Any]]:
    """Hosts of the sender and of the receiver; without workers both are on this machine."""
    if not addresses:
        yield None, None
        return
    from forge_env.config import load_config
    from forge_env.job.survey import survey
    from forge_env.run import Run, RunFolder
    from trainers.actors.hosts import Hosts

    keys = [*job(list(addresses), {"trainer": [0], "generator": [1]}), f"output_dir={folder}"]
    config = load_config("coding_rlvr", [*keys, f"model.cache_dir={folder}/cache"])
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


async def sync(megabytes: float, repeats: int, addresses: Sequence[str], folder: str) -> dict[str, list[float]]:
    """Return the milliseconds of each stage, `repeats` values each."""
    prepare_controller()
    from trainers.actors.processes import survive_deaths
    from trainers.actors.remote import result
    from trainers.weights.store import close_store, open_store

    survive_deaths()
    times: defaultdict[str, list[float]] = defaultdict(list)
    async with grounds(addresses, folder) as (near, far):
        senders = {
            kind: await Sender.options(mesh_name=kind, ground=near).as_actor(megabytes, kind) for kind in TRANSPORTS
        }
        receiver = await Receiver.options(ground=far).as_actor()
        shared, torchstore = senders.values()
        try:
            await open_store(torchstore._forge_proc_mesh, 1)
            for version in range(repeats + 1):
                if version == 1:  # the first version also allocates memory and imports modules
                    times.clear()
                for kind, sender in senders.items():
                    published, push_s = await result(sender.push.call_one(version))
                    started = time.perf_counter()
                    await result(receiver.pull.call_one(published))
                    pull_s = time.perf_counter() - started
                    for stage, seconds in ((" push", push_s), (" pull", pull_s), ("", push_s + pull_s)):
                        times[kind + stage].append(1e3 * seconds)
                started = time.perf_counter()
                keys = await result(torchstore.put_one_by_one.call_one())
                await result(receiver.pull_one_by_one.call_one(keys))
                times["tensor by tensor"].append(1e3 * (time.perf_counter() - started))
                if near is None:
                    times["memcpy"].append(1e3 * await result(shared.memcpy.call_one()))
                else:
                    count = int(megabytes * 2**20)
                    port = await result(shared.serve.call_one(near.address, count))
                    times["TCP copy"].append(1e3 * await result(receiver.copy.call_one(near.address, port, count)))
        finally:
            for actor in (receiver, *senders.values()):
                await Receiver.shutdown(actor)
            await close_store()
    return times


def measure(args: argparse.Namespace) -> list[str]:
    rows = []
    for hosts, size in ((hosts, size) for hosts in args.hosts for size in args.megabytes):
        with (
            tempfile.TemporaryDirectory(prefix="fe-") as folder,
            workers(hosts if hosts > 1 else 0, Path(folder)) as at,
        ):
            ms = apart("benchmarks.weights:sync", size, args.repeats, [host.address for host in at], folder)
        floor = "memcpy" if hosts == 1 else "TCP copy"
        for way in (*TRANSPORTS, "tensor by tensor", floor):
            stages = [spread(ms[name]) if (name := f"{way} {stage}") in ms else "" for stage in ("push", "pull")]
            of_floor = statistics.median(ms[way]) / statistics.median(ms[floor])
            rows.append([hosts, f"{size:g} MB", way, *stages, spread(ms[way]), f"{of_floor:.1f}"])
    return table(["hosts", "size", "way", "push ms", "pull ms", "together ms", "times one copy"], rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main("Weight sync", measure, megabytes=[3.5, 1024.0], repeats=5, hosts=[1, 2])
