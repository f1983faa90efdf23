"""Placement of a run's actors on hosts, decided before anything is started."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from forge_env.config.recipe import JobSection, Role, RunConfig
from forge_env.errors import UsageError
from forge_env.job.addresses import Address
from forge_env.job.card import Card
from forge_env.job.needs import needed_memory

BUFFER_GB = 0.5


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of placement: a replica, with all its processes.

    Attributes:
        hosts: number of hosts that it is spread over.
        procs: processes on each host.
        gpus: GPUs on each host.
        memory_gb: estimated GiB on each host.
    """

    role: Role
    name: str
    hosts: int
    procs: int
    gpus: int
    memory_gb: float


def units(config: RunConfig) -> Iterator[Unit]:
    """Yield all units in the order of placing: the ones that are hardest to place come first."""
    memory = needed_memory(config)

    def unit(role: Role, name: str, each_gb: float, procs: int = 1, hosts: int = 1, *, with_gpus: bool = False) -> Unit:
        per_host = procs // hosts
        return Unit(role, name, hosts, per_host, per_host * with_gpus, per_host * each_gb)

    section, trainer, reference = config.generator, config.trainer, config.grpo.reference
    yield unit("trainer", "trainer", memory["trainer"][1], trainer.procs, trainer.hosts, with_gpus=trainer.with_gpus)
    if not config.rolls_out:
        return
    if config.has_reference:
        each_gb = memory["reference"][1]
        yield unit("reference", "reference", each_gb, reference.procs, with_gpus=reference.with_gpus)
    for number in range(section.num_replicas):
        name, each_gb = f"generator{number}", memory["generator"][1]
        yield unit("generator", name, each_gb, section.procs, section.hosts, with_gpus=section.with_gpus)
    yield unit("buffer", "buffer", BUFFER_GB)
    for number in range(config.rollouts.workers):
        yield unit("rollouts", f"rollouts{number}", memory["rollout worker"][1])


@dataclass(frozen=True, slots=True)
class Place:
    """Numbers of a unit's hosts, and the ids of its GPUs on each."""

    hosts: tuple[int, ...]
    gpus: tuple[tuple[str, ...], ...]


class Plan:
    """The placement of all units, and the free resources of each host.

    Every GPU is given to one unit, or to one of each role (`job.share_gpus`). A unit goes to the least busy hosts that
    its role may use (`job.place`) and that have GPUs and memory for it; a unit without GPUs prefers hosts without any.
    Weight store and buffer go to the trainer's host.
    """

    def __init__(self, section: JobSection, addresses: Sequence[Address], cards: Sequence[Card]) -> None:
        self._section = section
        self._addresses = addresses
        self._cards = list(cards)
        self.places: dict[str, Place] = {}
        self.units: dict[str, Unit] = {}
        for role, numbers in section.place.items():
            if wrong := [number for number in numbers if number >= len(cards)]:
                raise UsageError(
                    f"job.place: {role} is placed on worker {wrong[0]}, but there are {len(cards)}",
                    fix=f"the first worker is number 0, the last is number {len(cards) - 1}",
                )

    def place(self, unit: Unit, among: Collection[int] | None = None) -> Place:
        """Place a unit, or move a unit that is already placed.

        Args:
            among: numbers of the hosts that can be used; default: all.

        Raises:
            UsageError: there is not enough room; states needed and free resources.
        """
        self.places.pop(unit.name, None)
        allowed = self._section.place.get(unit.role, [*range(len(self._cards))])
        hosts = [number for number in allowed if among is None or number in among]
        fits = [number for number in hosts if self._fits(unit, number)]
        chosen = sorted(fits, key=lambda number: self._rank(unit, number))[: unit.hosts]
        if len(chosen) < unit.hosts:
            needs = _figures(unit.gpus, unit.memory_gb)
            needs += "" if unit.hosts == 1 else f" on each of {unit.hosts} hosts"
            raise UsageError(
                f"no host has room for {unit.name}: it needs {needs}. Free: "
                + "; ".join(self._left(number, unit.role) for number in hosts),
                fix="use more or bigger hosts, list others in job.place, or lower procs, num_replicas, workers",
            )
        gpus = tuple(tuple(self._free_gpus(number, unit.role)[: unit.gpus]) for number in chosen)
        self.places[unit.name], self.units[unit.name] = Place(tuple(chosen), gpus), unit
        return self.places[unit.name]

    def replace(self, unit: Unit, living: Collection[int]) -> Place | None:
        """Move a unit whose host is lost to other hosts; None if it has to wait for its host to come back."""
        if self._section.on_loss == "wait":
            return None
        before = self.places.get(unit.name)
        try:
            return self.place(unit, living)
        except UsageError:
            if before is not None:
                self.places[unit.name] = before
            return None

    def renew(self, number: int, card: Card) -> None:
        """Replace the card of a worker that has restarted."""
        self._cards[number] = card

    def _on(self, number: int) -> list[tuple[Unit, Place]]:
        return [(self.units[name], placement) for name, placement in self.places.items() if number in placement.hosts]

    def _free_gpus(self, number: int, role: Role) -> list[str]:
        """Return the GPUs of a host that a unit of this role can use."""
        taken = {
            gpu
            for unit, placement in self._on(number)
            if unit.role == role or not self._section.share_gpus
            for host, gpus in zip(placement.hosts, placement.gpus, strict=True)
            if host == number
            for gpu in gpus
        }
        return [gpu for gpu in self._cards[number].gpus if gpu not in taken]

    def _free_memory_gb(self, number: int) -> float:
        return self._cards[number].free_memory_gb - sum(unit.memory_gb for unit, _ in self._on(number))

    def _fits(self, unit: Unit, number: int) -> bool:
        return len(self._free_gpus(number, unit.role)) >= unit.gpus and self._free_memory_gb(number) >= unit.memory_gb

    def _rank(self, unit: Unit, number: int) -> tuple[bool, bool, float, int]:
        """Return a sort key for hosts; lower is better."""
        card = self._cards[number]
        trainer = self.places.get("trainer")
        apart = unit.role == "buffer" and trainer is not None and number not in trainer.hosts
        busy = sum(other.procs for other, _ in self._on(number)) / card.cpus
        return apart, not unit.gpus and bool(card.gpus), busy, number

    def _left(self, number: int, role: Role) -> str:
        names = ", ".join(unit.name for unit, _ in self._on(number))
        return (
            f"on {self._name(number)}, {_figures(len(self._free_gpus(number, role)), self._free_memory_gb(number))}"
            f"{f' (used by {names})' if names else ''}"
        )

    def _name(self, number: int) -> str:
        return f"{number} {self._addresses[number]} ({self._cards[number].host})"

    def __str__(self) -> str:
        """Describe each host in a line: its resources, and the units on it."""
        lines = []
        for number, card in enumerate(self._cards):
            names = ", ".join(unit.name for unit, _ in self._on(number)) or "nothing"
            has = f"{card.cpus} CPUs, {_figures(len(card.gpus), card.free_memory_gb)} free"
            lines.append(f"host {self._name(number)}, {has}: {names}")
        return "\n".join(lines)


def _figures(gpus: int, memory_gb: float) -> str:
    memory = "" if math.isinf(memory_gb) else f" and {memory_gb:.1f} GiB"  # infinite for a host still to be requested
    return f"{gpus} GPU{'' if gpus == 1 else 's'}{memory}"


def make_plan(config: RunConfig, addresses: Sequence[Address], cards: Sequence[Card]) -> Plan:
    """Place everything that the recipe asks for."""
    plan = Plan(config.job, addresses, cards)
    for unit in units(config):
        plan.place(unit)
    return plan
