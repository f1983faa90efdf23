"""Hosts of a rehearsal: whether a run finds room on them, survives the death of one, and resumes on fewer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forge_env import __version__
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.job.addresses import Address
from forge_env.job.card import Card
from forge_env.job.needs import CONTROLLER_GB, SANDBOXES_GB
from forge_env.job.plan import Plan, make_plan, units
from forge_env.run.rehearsal import Finding
from trainers.loop.checkpoints import differences
from trainers.plan.forecast import Forecast
from trainers.plan.hardware import Cluster
from trainers.plan.speed import Workload


@dataclass(frozen=True, slots=True)
class Host:
    """Resources of each host.

    Attributes:
        cluster: its GPUs; a count of 0 for none.
        cpus: its processors.
        memory_gb: its main memory, GiB.
        disk_gb: free space for the run folder, GiB.
    """

    cluster: Cluster
    cpus: int
    memory_gb: float
    disk_gb: float

    def __str__(self) -> str:
        gpus = f"{self.cluster.count} {self.cluster.gpu.name}, " if self.cluster.count else ""
        return f"{gpus}{self.cpus} CPUs, {self.memory_gb:,.0f} GiB of memory"


def placed(config: RunConfig, host: Host, count: int) -> Plan:
    """Place a run on `count` equal hosts.

    Raises:
        UsageError: there is not enough room.
    """
    ids = [str(number) for number in range(host.cluster.count)]
    free = host.memory_gb - config.watchdog.free_memory_gb - CONTROLLER_GB - SANDBOXES_GB
    cards = [Card(__version__, "", f"host{n}", "", "", host.cpus, free, ids) for n in range(count)]
    addresses = [Address("tcp", f"host{n}", config.job.port) for n in range(count)]
    return make_plan(config, addresses, cards)


def memory_by_host(config: RunConfig, plan: Plan, count: int) -> list[float]:
    """Estimated GiB in use on each host."""
    used = [0.0] * count
    for unit in units(config):
        for number in plan.places[unit.name].hosts:
            used[number] += unit.memory_gb
    return used


def deaths(config: RunConfig, host: Host, count: int) -> Iterator[Finding]:
    """Find hosts whose death the run would not survive: it would wait until the host is back."""
    stuck: dict[int, list[str]] = {}
    for number in range(count):
        plan = placed(config, host, count)
        living = {other for other in range(count) if other != number}
        lost = [name for name, place in plan.places.items() if number in place.hosts]
        homeless = [name for name in lost if plan.replace(plan.units[name], living) is None]
        left = [name for name in plan.places if name.startswith("generator") and name not in homeless]
        if vital := [name for name in homeless if not name.startswith("generator") or not left]:
            stuck[number] = vital
    if not stuck:
        return
    number, names = next(iter(stuck.items()))
    hosts = f"host {number}" if len(stuck) == 1 else f"each of the hosts {', '.join(map(str, stuck))}"
    text = f"the run does not survive the death of {hosts}: {', '.join(names)} would wait until host {number} is back"
    if config.job.on_loss == "wait":
        yield Finding("job.on_loss", text, "use job.on_loss=place, which moves actors to the other hosts")
    elif config.job.place:
        key = f"job.place.{plan.units[names[0]].role}"
        yield Finding(key, text, f"list more hosts in {key}")
    else:
        fix = f"use a spare host (--hosts {count + 1}), or a smaller layout: trainer.procs, generator.num_replicas"
        yield Finding("job.workers", text, fix)


def resumes(config: RunConfig, host: Host, count: int, work: Workload) -> Iterator[Finding]:
    """Find out whether the run could be resumed on one host less, and with which keys if not as it is."""
    fewer = count - 1
    try:
        placed(config, host, fewer)
    except UsageError as error:
        text = f"a resume on {fewer} host{'s' * (fewer != 1)} fails: {error.message.partition(' Free:')[0]}"
        if config.job.place and max(map(max, config.job.place.values())) >= fewer:
            yield Finding("job.place", text, "name only hosts that are left, or leave job.place out")
            return
        if (smaller := _smaller(config, host, fewer, work)) is None:
            fix = "no smaller layout fits into its memory either: keep a spare host"
            yield Finding("trainer.procs", text, fix)
            return
        keys = (
            f"trainer.procs={smaller.trainer.procs} trainer.hosts={smaller.trainer.hosts} "
            f"generator.num_replicas={smaller.generator.num_replicas}"
        )
        yield Finding("trainer.procs", text, f"resume with {keys}; the checkpoint allows it")


def _smaller(config: RunConfig, host: Host, count: int, work: Workload) -> RunConfig | None:
    """The largest layout with fewer processes of the trainer or fewer generators that fits on `count` hosts."""
    for procs in _divisors(config.trainer.procs):
        for replicas in range(config.generator.num_replicas, 0, -1):
            data = config.model_dump()
            data["trainer"] |= {"procs": procs, "hosts": math.gcd(procs, min(config.trainer.hosts, count))}
            data["generator"] |= {"num_replicas": replicas}
            try:
                smaller = RunConfig.model_validate(data)
                placed(smaller, host, count)
                forecast = Forecast(smaller, work, Cluster(host.cluster.count * count, host.cluster.gpu))
            except (UsageError, ValueError):
                continue
            if not forecast.problems and not differences(config.model_dump(mode="json"), smaller):
                return smaller
    return None


def _divisors(number: int) -> Sequence[int]:
    return [each for each in range(number, 0, -1) if number % each == 0]
