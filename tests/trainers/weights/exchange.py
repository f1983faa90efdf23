"""Weights from a trainer of two ranks to two readers: python -m tests.trainers.weights.exchange TRANSPORT [RECIPE]

With a recipe, its two hosts have the trainer and the readers; otherwise everything is on this machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge_env.config import load_config
from forge_env.job.survey import survey
from forge_env.run import Run, RunFolder
from trainers.loop.stack import prepare_controller

prepare_controller()

import torch  # noqa: E402

from trainers.actors.actor import endpoint  # noqa: E402
from trainers.actors.hosts import Hosts  # noqa: E402
from trainers.actors.processes import end_of, survive_deaths  # noqa: E402
from trainers.actors.ranks import RankedActor  # noqa: E402
from trainers.actors.remote import ActorDiedError, agreed, result  # noqa: E402
from trainers.model.parts import Part  # noqa: E402
from trainers.weights.reader import Reader  # noqa: E402
from trainers.weights.transport import Published, Sender  # noqa: E402

UPDATES = 24
ROWS = 30_000
PIECE = 100_000
"""Bytes of a piece in TorchStore, so that the matrix has several."""


class Trainer(RankedActor):
    """Two ranks; the first has two thirds of a matrix, and a counter that the other lacks."""

    @endpoint
    async def setup(self) -> None:
        self._upload: asyncio.Task[None] | None = None

    @endpoint
    async def use(self, transport: str) -> None:
        if transport == "torchstore":
            from trainers.weights import store

            store.PIECE = PIECE
            self._sender: Sender = store.StoreSender(torch.bfloat16)
        else:
            self._sender = Sender(torch.bfloat16)

    @endpoint
    async def push(self, version: int) -> Published:
        import torch.distributed as dist

        first, count = (0, 2 * ROWS // 3) if self.rank == 0 else (2 * ROWS // 3, ROWS // 3)
        parts = [Part("matrix", (first, 0), (ROWS, 10), torch.full((count, 10), float(version)))]
        if self.rank == 0:
            parts.append(Part("counter", (), (), torch.tensor(version)))
        offers: list[Any] = [None, None]
        dist.all_gather_object(offers, self._sender.snapshot(parts))
        published = self._sender.publish(offers)
        await self._sender.upload(version)
        return published

    @endpoint
    async def suspend(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    @endpoint
    async def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        await end_of(pid)


class Generator(RankedActor):
    """A reader, which keeps the weights it has read."""

    @endpoint
    async def setup(self) -> None:
        from trainers.weights import store

        store.PIECE = PIECE
        self._reader, self._weights = Reader(), {}

    @endpoint
    async def take(self, published: Published) -> int:
        self._weights = dict(await self._reader.take(published))
        return await self._check()

    @endpoint
    async def take_as_a_rank_dies(self, published: Published, first: Any) -> int:
        """Read a version, during which the trainer's first rank kills the second."""
        taking = asyncio.ensure_future(self._reader.take(published))
        with suppress(ActorDiedError):  # Monarch may end the first rank too
            await result(first.kill.call_one(published.processes[1].pid))
        self._weights = dict(await taking)
        return await self._check()

    @endpoint
    async def check(self) -> int:
        """Return the number of the version that was read last."""
        return await self._check()

    async def _check(self) -> int:
        version = int(self._weights["counter"])
        assert self._weights["matrix"].shape == (ROWS, 10)
        assert self._weights["matrix"].unique().tolist() == [version]
        return version

    @endpoint
    async def find(self, version: int) -> Published:
        return await self._reader.find(version)


async def start_trainer(transport: str, ground: Any) -> Any:
    """Start the trainer, and with TorchStore the store in its processes."""
    actor = await Trainer.options(procs=2, mesh_name="trainer", ground=ground).as_actor()
    await result(actor.use.call(transport))
    if transport == "torchstore":
        from trainers.weights.store import open_store

        await open_store(actor._forge_proc_mesh, 2)
    return actor


async def refused(call: Any) -> type[Exception]:
    try:
        await result(call)
    except OSError as error:
        return type(error)
    raise AssertionError("it did not fail")


async def exchange(transport: str, trainer_ground: Any, reader_ground: Any) -> None:
    """Parity after many updates, staleness, and deaths."""
    trainer = await start_trainer(transport, trainer_ground)
    fast, slow = [
        await Generator.options(mesh_name=f"generator{number}", ground=reader_ground).as_actor() for number in (0, 1)
    ]
    first = await agreed(trainer.push.call(1))
    assert await result(slow.take.call_one(first)) == 1
    for version in range(2, UPDATES + 1):
        newest = await agreed(trainer.push.call(version))
        assert await result(fast.take.call_one(newest)) == version

    # A slow reader keeps the version it has begun to read, is refused versions that were dropped, and catches up.
    assert await result(slow.check.call_one()) == 1
    assert await refused(slow.take.call_one(first)) is FileNotFoundError
    assert await result(slow.take.call_one(newest)) == UPDATES
    if transport == "torchstore":
        assert await result(slow.find.call_one(UPDATES)) == newest
    assert await refused(slow.find.call_one(1)) is FileNotFoundError

    # A reader whose trainer dies has all weights of a version or none, and none afterwards. The suspended rank sends
    # nothing, so no transfer from it is complete before its death.
    first_rank = trainer.slice(procs=0)
    await result(first_rank.suspend.call_one(newest.processes[1].pid))
    dying = slow.take_as_a_rank_dies.call_one(newest, first_rank)
    if transport == "shared" and reader_ground is None:
        with suppress(FileNotFoundError):
            assert await result(dying) == UPDATES
    else:
        assert issubclass(await refused(dying), ConnectionError | FileNotFoundError)
    for reader in (slow, fast):
        assert issubclass(await refused(reader.take.call_one(newest)), ConnectionError | FileNotFoundError)

    # Readers use the weights of the next trainer, under numbers that were used before.
    await Trainer.shutdown(trainer, dead=True)
    trainer = await start_trainer(transport, trainer_ground)
    again = await agreed(trainer.push.call(UPDATES))
    for reader in (slow, fast):
        assert await result(reader.take.call_one(again)) == UPDATES
    for actor in (slow, fast, trainer):
        await Trainer.shutdown(actor)
    if transport == "torchstore":
        from trainers.weights.store import close_store

        await close_store()


async def main() -> None:
    """Exchange weights as the command line says."""
    survive_deaths()
    transport, *recipe = sys.argv[1:]
    if not recipe:
        await exchange(transport, None, None)
    else:
        config = load_config(recipe[0])
        folder = RunFolder(Path(config.output_dir, "run"))
        folder.create()
        run = Run(config, folder)
        surveyed = await survey(config, folder.root)
        assert surveyed is not None
        hosts = Hosts(run, surveyed)
        await hosts.open()
        await exchange(transport, await hosts.ground("trainer"), await hosts.ground("generator0"))
        await hosts.close()
    print("EXCHANGED", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
