"""A controller of actors on several hosts, one of which is lost. python on_hosts.py RECIPE"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from forge_env.config import load_config
from forge_env.job.plan import Unit
from forge_env.job.survey import survey
from forge_env.run import Run, RunFolder
from trainers.loop.stack import prepare_controller

prepare_controller()

from trainers.actors.actor import endpoint  # noqa: E402
from trainers.actors.hosts import Hosts  # noqa: E402
from trainers.actors.processes import survive_deaths  # noqa: E402
from trainers.actors.ranks import RankedActor  # noqa: E402
from trainers.actors.remote import result  # noqa: E402


class Sum(RankedActor):
    """Ranks that add up."""

    @endpoint
    async def add(self) -> tuple[str, float]:
        """Name of the host, and the sum of the ranks + 1."""
        import torch
        import torch.distributed as dist

        total = torch.tensor([float(self.rank + 1)])
        if dist.is_initialized():
            dist.all_reduce(total)
        print("added", flush=True)
        return socket.gethostname(), float(total)


async def both_lost(hosts: Hosts) -> None:
    """An actor on each host; both hosts are lost at once."""
    actors = [
        await Sum.options(mesh_name=role, ground=await hosts.ground(role)).launch()
        for role in ("trainer", "generator0")
    ]
    watches = [Sum.watch(actor) for actor in actors]
    print("BOTH", *[await result(actor.add.call_one()) for actor in actors], flush=True)
    print("LOST", *await asyncio.gather(*watches, return_exceptions=True), sep="; ", flush=True)


async def main() -> None:
    """Two ranks on two hosts; then one on the first, which is lost."""
    survive_deaths()
    config = load_config(sys.argv[1])
    folder = RunFolder(Path(config.output_dir, "run"))
    folder.create()
    run = Run(config, folder)
    found = await survey(config, folder.root)
    found.plan.place(Unit("reference", "wide", 2, 1, 0, 0.1))
    hosts = Hosts(run, found)
    await hosts.open()
    if sys.argv[2:] == ["both"]:
        await both_lost(hosts)
        return

    wide = await Sum.options(procs=2, mesh_name="wide", ground=await hosts.ground("wide")).launch()
    print("WIDE", sorted((await result(wide.add.call())).values()), flush=True)
    await Sum.shutdown(wide)

    actor = await Sum.options(mesh_name="trainer", ground=await hosts.ground("trainer")).launch()
    watch = Sum.watch(actor)
    print("FIRST", await result(actor.add.call_one()), flush=True)
    died = await asyncio.gather(watch, return_exceptions=True)
    await Sum.shutdown(actor, dead=True)  # takes until nothing answers: only then may the host be back
    print("LOST", *died, flush=True)
    actor = await Sum.options(mesh_name="trainer", ground=await hosts.ground("trainer")).launch()
    print("SECOND", await result(actor.add.call_one()), run.state.warnings, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await Sum.shutdown(actor)
    await hosts.close()
    folder.release()
    print("END", flush=True)


asyncio.run(main())
