"""Replicas of one actor that heal: each is watched, and started again when it ends.

A replica goes through these states, without polling:

    starting -> healthy -> recovering -> healthy ... -> failed (after too many deaths in a row)
                                                     -> stopped (`stop`)

The health of a replica is watched by one call that never returns (`ForgeActor.watch`): Monarch ends it when any process
of the replica dies, hangs, or loses its host. `Replicas` is a plain object in the process that created it, not an
actor: that saves one hop, and one process that could die.

Generators (`trainers.generator.pool`), rollout workers (`trainers.rollout.rollouts`) and services
(`trainers.actors.service`) are made of them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from forge_env.concurrency import to_its_end
from forge_env.errors import ForgeError, InfrastructureError
from trainers.actors.remote import ActorDiedError, agreed

MOST_BACKOFF_S = 30.0
NOTICE_S = 30.0
"""Seconds to wait for the replica's own watch to notice a death after a call has failed because of it."""
logger = logging.getLogger(__name__)


class ServiceDownError(InfrastructureError):
    """No replica is left, and none will be restarted."""


class ReplicaState(StrEnum):
    """Lifecycle state of a replica."""

    STARTING = "starting"
    HEALTHY = "healthy"
    RECOVERING = "recovering"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Limits of a service: concurrency, queue, repeats and restarts.

    Attributes:
        max_in_flight: maximum concurrent calls per replica; other calls wait in order of arrival.
        max_queue: maximum number of waiting calls; the next one fails with `ServiceOverloadedError`.
        repeats: how often a repeatable call is repeated because its replica died.
        max_deaths: deaths of one replica in a row, each within `healthy_s` of its start, until it is given up.
        healthy_s: seconds of health after which earlier deaths are forgotten.
        backoff_s: seconds before the first restart; doubled for each following one, at most 30 s.
        slack: how many more calls than the least busy replica one may have in flight and still be chosen for its cache.
    """

    max_in_flight: int = 64
    max_queue: int = 10_000
    repeats: int = 5
    max_deaths: int = 5
    healthy_s: float = 30.0
    backoff_s: float = 0.1
    slack: int = 16


@dataclass(slots=True)
class ReplicaMetrics:
    """Metrics of one replica since the service was started.

    Attributes:
        deaths: number of times it ended without being stopped.
        seconds: total duration of its calls.
        start_s: duration of its last start, until it was healthy.
        down_s: total time between a death and the next healthy state.
    """

    state: ReplicaState = ReplicaState.STARTING
    total_requests: int = 0
    failed_requests: int = 0
    in_flight: int = 0
    deaths: int = 0
    seconds: float = 0.0
    start_s: float = 0.0
    down_s: float = 0.0


@dataclass(eq=False, slots=True)
class Replica:
    """One actor of a service, restarted when it ends; each start begins a new life.

    Attributes:
        actor: actor of the current life, or None while it is restarted.
        life: number of starts so far.
    """

    number: int
    actor: Any = None
    life: int = 0
    death: asyncio.Future[None] | None = None
    """Done when the current life has ended."""
    deaths_in_a_row: int = 0
    metrics: ReplicaMetrics = field(default_factory=ReplicaMetrics)

    @property
    def healthy(self) -> bool:
        """Whether the replica can be called."""
        alive = self.death is None or not self.death.done()
        return alive and self.metrics.state is ReplicaState.HEALTHY

    async def call(self, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint of the current life; returns or raises what it does.

        Raises:
            ActorDiedError: the replica ended first. It is no longer `healthy` then, so a caller that retries doesn't
                get the same dead replica.
        """
        self.metrics.total_requests += 1
        self.metrics.in_flight += 1
        began = time.perf_counter()
        try:
            return await self._call(endpoint, *args, **kwargs)
        except Exception:  # counted, then raised in the caller
            self.metrics.failed_requests += 1
            raise
        finally:
            self.metrics.in_flight -= 1
            self.metrics.seconds += time.perf_counter() - began

    async def _call(self, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        death = self.death
        if self.actor is None or death is None:
            raise ActorDiedError("it is being restarted")
        call = asyncio.ensure_future(agreed(getattr(self.actor, endpoint).call(*args, **kwargs)))
        try:
            await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                if isinstance(call.exception(), ActorDiedError):
                    await asyncio.wait([death], timeout=NOTICE_S)
                return call.result()
            why = None if death.cancelled() else death.exception()
            raise ActorDiedError(str(why or "it was stopped")) from why
        finally:
            call.cancel()


class Replicas:
    """Replicas of `actor_class`, constructed with `args` and `kwargs`; `failure` fails when one is given up."""

    def __init__(self, actor_class: Any, *args: Any, **kwargs: Any) -> None:
        self._class, self._args, self._kwargs = actor_class, args, kwargs
        self.name: str = actor_class.mesh_name or actor_class.__name__.lower()
        self.options: ServiceOptions = actor_class.service
        self.replicas = [Replica(number) for number in range(actor_class.num_replicas)]
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes = asyncio.Event()
        self._lives: list[asyncio.Task[None]] = []

    @property
    def healthy(self) -> list[Replica]:
        """The replicas that can be called."""
        return [replica for replica in self.replicas if replica.healthy]

    # --- start, restart and stop

    async def start(self) -> None:
        """Start every replica; if one can't be started, all are stopped and its error is raised."""
        started = [asyncio.get_running_loop().create_future() for _ in self.replicas]
        self._lives = [
            asyncio.create_task(self._live(replica, first))
            for replica, first in zip(self.replicas, started, strict=True)
        ]
        try:
            await asyncio.gather(*started)
        except BaseException:  # cancellation too: no process may be left
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop every replica; calls in progress fail."""
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        if self._class.spare is not None:
            await self._class.spare.close()
        self.notify()
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()  # retrieved, so that asyncio doesn't log it

    async def launch(self, replica: Replica) -> Any:
        """Start the processes and the actor of a replica's next life; override it to start replicas differently."""
        return await self._class.launch(*self._args, **self._kwargs)

    async def set_up(self, replica: Replica) -> None:
        """Set up a launched replica; override it to add steps."""
        await replica.call("setup")

    def changed(self, replica: Replica) -> None:
        """Called after a replica's state has changed; override it to observe states."""

    async def _live(self, replica: Replica, first: asyncio.Future[None]) -> None:
        """Run one replica: start it, and restart it after each death until it is given up or stopped."""
        try:
            while True:
                why = await self._one_life(replica, first)
                if not first.done():
                    if isinstance(why, ActorDiedError):  # other errors, raised by `setup`, speak for themselves
                        text = f"{self.name} {replica.number} died during its start: {why}"
                        why = ActorDiedError(text, fix=why.fix)
                    first.set_exception(why)
                    return
                replica.metrics.deaths += 1
                replica.deaths_in_a_row += 1
                died = time.perf_counter()
                if replica.deaths_in_a_row >= self.options.max_deaths:
                    raise why
                self._enter(replica, ReplicaState.RECOVERING)
                cause = None if isinstance(why, ForgeError) else why
                logger.warning("%s %d ended and is being restarted: %s", self.name, replica.number, why, exc_info=cause)
                await self._bury(replica)
                backoff_s = min(self.options.backoff_s * 2.0 ** (replica.deaths_in_a_row - 1), MOST_BACKOFF_S)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                replica.metrics.down_s += time.perf_counter() - died
        except Exception as error:  # noqa: BLE001 - any error that ended its last life
            logger.error("%s %d will not be restarted: %s", self.name, replica.number, error)
            self._enter(replica, ReplicaState.FAILED)
            if not self.failure.done():
                self.failure.set_exception(self._given_up(replica, error))
        finally:
            if replica.metrics.state is not ReplicaState.FAILED:
                self._enter(replica, ReplicaState.STOPPED)
            burial = self._bury(replica, dead=replica.metrics.state is ReplicaState.FAILED)
            await to_its_end(asyncio.ensure_future(burial))  # also if cancelled: no process may be left
            if not first.done():
                first.cancel()

    async def _one_life(self, replica: Replica, first: asyncio.Future[None]) -> Exception:
        """Start a replica and wait for its end; returns the reason."""
        began = time.perf_counter()
        try:
            replica.actor = await self.launch(replica)
            replica.life += 1
            logger.info("%s%d: %s", self.name, replica.number, replica.actor._forge_named)
            replica.death = self._class.watch(replica.actor)
            await self.set_up(replica)
            replica.metrics.start_s = time.perf_counter() - began
            if replica.metrics.deaths:
                replica.metrics.down_s += replica.metrics.start_s
            self._enter(replica, ReplicaState.HEALTHY)
            self._class.prepare_spare()
            if not first.done():
                first.set_result(None)
            healthy = time.perf_counter()
            try:
                await asyncio.shield(replica.death)
            finally:
                if time.perf_counter() - healthy > self.options.healthy_s:
                    replica.deaths_in_a_row = 0
        except Exception as error:  # noqa: BLE001 - `_live` reports it: any error ends this life
            return error
        return ActorDiedError("it has ended")

    async def _bury(self, replica: Replica, *, dead: bool = True) -> None:
        actor, replica.actor, death, replica.death = replica.actor, None, replica.death, None
        if death is not None:
            death.cancel()
            await asyncio.gather(death, return_exceptions=True)
        if actor is not None:
            await self._class.shutdown(actor, dead=dead)

    def _given_up(self, replica: Replica, error: Exception) -> ForgeError:
        failure = ServiceDownError(
            f"{self.name} {replica.number} died {replica.metrics.deaths} times and will not be restarted: {error}",
            fix="run.log has the cause",
        )
        failure.__cause__ = error
        return failure

    def _enter(self, replica: Replica, state: ReplicaState) -> None:
        replica.metrics.state = state
        self.changed(replica)
        self.notify()

    # --- calls

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until `true` returns True; it is called after every change of a replica's state and every `notify`."""
        while not true():
            self._changes.clear()
            await self._changes.wait()

    def notify(self) -> None:
        """Let calls that wait for a change look again."""
        self._changes.set()

    def check(self) -> None:
        """Raise the error that ended a replica permanently, if there is one."""
        if self.failure.done() and not self.failure.cancelled() and (error := self.failure.exception()) is not None:
            raise error

    async def call_healthy(self, endpoint: str, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Call an endpoint of every healthy replica; returns the results by the replica's number, errors as values."""
        healthy = self.healthy
        calls = [replica.call(endpoint, *args, **kwargs) for replica in healthy]
        results = await asyncio.gather(*calls, return_exceptions=True)
        return {replica.number: value for replica, value in zip(healthy, results, strict=True)}

    async def call_all(self, endpoint: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call an endpoint of every replica; the result is None for replicas that are not healthy or failed."""
        results = await self.call_healthy(endpoint, *args, **kwargs)
        values = [results.get(replica.number) for replica in self.replicas]
        return [None if isinstance(value, BaseException) else value for value in values]
