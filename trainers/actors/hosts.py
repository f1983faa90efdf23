"""Monarch's connections to the hosts of a run: attaches to them, and again after a loss.

A host is alive as long as its worker (`forge-env worker`). A restarted worker is a new one to Monarch and to this
module: its card (`forge_env.job.card`) has a new address to attach to.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_env.concurrency import gather_or_cancel
from forge_env.errors import ForgeError
from forge_env.job.addresses import Address, own_address
from forge_env.job.card import Card, NoWorkerError, Question, ask, until_lost
from forge_env.job.plan import Place, Unit
from forge_env.job.survey import Survey, stage
from forge_env.machine import cache_dir
from forge_env.run.run import Run
from trainers.actors.processes import Ground, Setting

ATTACH_S = 30.0
"""Seconds that Monarch has to attach to a worker that answers."""
STOP_S = 10.0
RETRY_S = 2.0
"""Seconds between two checks whether a lost host is back."""
LOAD_S = 2.0
"""Seconds between two load queries of a host."""
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Host:
    """A host and the current life of its worker."""

    number: int
    address: Address
    card: Card
    mesh: Any = None
    life: int = 0
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost: asyncio.Future[None] | None = None
    """Done when the current life has ended."""
    told: Card | None = None
    """The newest card with the host's load."""
    counted: Card | None = None
    """The card at the last report of `Hosts.metrics`."""

    @property
    def name(self) -> str:
        return f"{self.number}-{self.card.host}"


class Hosts:
    """Attaches to the workers and chooses the hosts on which each unit is started."""

    def __init__(self, run: Run, found: Survey) -> None:
        self._run = run
        self._plan = found.plan
        self._hosts = [
            _Host(number, address, card)
            for number, (address, card) in enumerate(zip(found.addresses, found.cards, strict=True))
        ]
        self._wide: dict[tuple[str, ...], Any] = {}
        self._unseen = found.unseen
        self._asking: asyncio.Future[list[None]] | None = None

    async def open(self) -> None:
        """Attach to every worker; call this before any other use of Monarch."""
        from monarch.actor import enable_transport

        first = self._hosts[0].address
        controller = own_address(self._run.config.job, [host.address for host in self._hosts])
        enable_transport(f"{first.scheme}://{controller}:0")
        self._run.folder.logs.mkdir(exist_ok=True)
        await gather_or_cancel([self._attach(host) for host in self._hosts])
        self._asking = asyncio.gather(*(self._keep_asking(host) for host in self._hosts))

    async def close(self) -> None:
        """End all remaining processes on the hosts; the workers then wait for the next run."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for host in self._hosts:
            if host.lost is not None:
                host.lost.cancel()
        await asyncio.gather(*(self._leave(host) for host in self._hosts))

    async def _keep_asking(self, host: _Host) -> None:
        while True:
            try:
                host.told = await ask(host.address, Question(gpus=False))
                host.counted = host.counted or host.told
            except ForgeError as error:
                logger.debug("load of host %d is unknown: %s", host.number, error)
            await asyncio.sleep(LOAD_S)

    def metrics(self) -> dict[str, float]:
        """Load of each host that has reported since the last call.

        `host/NUMBER-NAME/cpus_busy` is the average number of busy processors since then,
        `host/NUMBER-NAME/free_memory_gb` the free memory in GiB.
        """
        metrics = {}
        for host in self._hosts:
            now, before = host.told, host.counted
            if now is None or before is None or (seconds := now.at_s - before.at_s) <= 0:  # negative after a reboot
                continue
            metrics[f"host/{host.name}/cpus_busy"] = (now.busy_s - before.busy_s) / seconds
            metrics[f"host/{host.name}/free_memory_gb"] = now.free_memory_gb
            host.counted = now
        return metrics

    async def staged(self, model: Path) -> Path:
        """Return a path of the model's folder that all hosts see: a copy in the cache if one of them doesn't see it."""
        if not any(model.is_relative_to(folder) for folder in self._unseen):
            return model
        copy = await asyncio.to_thread(stage, model, cache_dir(self._run.config.model.cache_dir))
        self._run.note(f"Not every host sees {model}: it was copied to {copy}")
        return copy

    async def ground(self, name: str) -> Ground:
        """Return the hosts to start a unit on: the previous ones if they are alive, else as `job.on_loss` specifies."""
        unit, placement = self._plan.units[name], self._plan.places[name]
        while lost := [self._hosts[number] for number in placement.hosts if not await self._lives(self._hosts[number])]:
            names = ", ".join(f"{host.number} ({host.address})" for host in lost)
            living = {host.number for host in self._hosts if await self._lives(host)}
            if (replacement := self._plan.replace(unit, living)) is not None:
                placement = replacement
                self._run.warn(f"host {names} is lost: {name} moves to host {', '.join(map(str, placement.hosts))}")
                continue
            self._run.warn(f"host {names} is lost: {name} waits for it to return")
            for host in lost:
                while not await self._lives(host):  # noqa: ASYNC110 - there is no event for a host that is back
                    await asyncio.sleep(RETRY_S)
        return await self._ground(unit, placement)

    async def _lives(self, host: _Host) -> bool:
        """Whether a host is alive; attaches again to one that came back."""
        async with host.looking:
            try:
                card = await ask(host.address)
                if card.monarch != host.card.monarch or host.mesh is None:
                    host.card = card
                    self._plan.renew(host.number, card)
                    await self._attach(host)
            except ForgeError as error:
                logger.info("host %d: %s", host.number, error)
                host.mesh = None
                return False
            return True

    async def _attach(self, host: _Host) -> None:
        host.life += 1
        host.mesh = await _attached(f"host{host.number}life{host.life}", [host.card])
        host.lost = asyncio.ensure_future(until_lost(host.address))
        logger.info("host %d: %s, %s", host.number, host.address, host.card.host)

    async def _leave(self, host: _Host) -> None:
        if host.mesh is None:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await host.mesh.stop()
        except Exception as error:  # noqa: BLE001 - boundary of Monarch: detaching from a lost host may fail in any way
            logger.debug("detaching from host %d failed: %s", host.number, error)

    async def _ground(self, unit: Unit, place: Place) -> Ground:
        hosts = [self._hosts[number] for number in place.hosts]
        mesh = hosts[0].mesh
        if len(hosts) > 1:
            lives = tuple(host.card.monarch for host in hosts)
            if lives not in self._wide:
                self._wide[lives] = await _attached(f"{unit.name}wide{len(self._wide)}", [host.card for host in hosts])
            mesh = self._wide[lives]
        settings = {
            host.card.monarch: Setting(
                gpus=gpus,
                log=self._run.folder.logs / f"{host.name}.log",
                folder=Path.cwd(),
                address=host.address,
            )
            for host, gpus in zip(hosts, place.gpus, strict=True)
        }
        lost = [host.lost for host in hosts if host.lost is not None]
        return Ground(mesh, len(hosts), ", ".join(host.name for host in hosts), settings, lost)


async def _attached(name: str, cards: list[Card]) -> Any:
    from monarch.actor import attach_to_workers

    workers = [card.monarch for card in cards]
    mesh = attach_to_workers(name=name, ca="trust_all_connections", workers=workers)
    try:
        async with asyncio.timeout(ATTACH_S):
            await mesh.initialized
    except Exception as error:  # boundary of Monarch
        raise NoWorkerError(f"Monarch can't attach to {', '.join(workers)}: {error or 'no answer'}") from error
    return mesh.with_python_executable(cards[0].python)
