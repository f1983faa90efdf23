"""`Service`: replicas of one actor behind one handle, restarted when they die.

    counters = await Counter.options(num_replicas=2).as_service(0)
    await counters.add.route(1)                      # one replica, the least busy
    async with counters.session():                   # a session stays on one replica while that lives
        await counters.add.route(1)
    await counters.value.fanout()                    # every replica that is up: a list
    await counters.stop()

A replica goes through these states, without polling:

    starting -> healthy -> recovering -> healthy ... -> failed (after too many deaths in a row)
                                                     -> stopped (`stop`)

The health of a replica is watched by one call that never returns (`ForgeActor.watch`): Monarch ends it when any process
of the replica dies, hangs, or loses its host. A service is a plain object in the process that created it, not an actor:
that saves one hop, and one process that could die.

**Calls.** An exception in an endpoint is raised in its caller, with the traceback of the other process; other calls are
not affected. A call that waits for a free replica goes to any healthy one. A call in progress on a replica that dies is
repeated on another one if its endpoint is `ForgeActor.repeatable`; otherwise it fails with `ActorDiedError`, since it
may or may not have been carried out.

**State.** A restarted replica becomes healthy only once it has the others' state: `fanout` calls made with
`using(keep=True)`, such as the newest weights, are replayed on it first. A call is kept only if at least one replica
has carried it out and none has raised.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import random
import time
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from forge_env.concurrency import to_its_end
from forge_env.errors import ForgeError, InfrastructureError, UsageError
from trainers.actors.remote import ActorDiedError, agreed
from trainers.actors.router import Router

MOST_BACKOFF_S = 30.0
TOLD_S = 30.0
"""Seconds to wait for the service's own watch to notice a replica's death after a call has failed because of it."""
SESSIONS: contextvars.ContextVar[Mapping[Service, Session]] = contextvars.ContextVar("sessions", default={})  # noqa: B039 - never changed
"""Sessions that the current code runs in, at most one per service."""
logger = logging.getLogger(__name__)


class ServiceDownError(InfrastructureError):
    """No replica is left, and none will be restarted."""


class ServiceOverloadedError(InfrastructureError):
    """The service's queue of waiting calls is full."""


class ReplicaState(StrEnum):
    """Lifecycle state of a replica."""

    STARTING = "starting"
    HEALTHY = "healthy"
    RECOVERING = "recovering"
    FAILED = "failed"
    STOPPED = "stopped"


class Session(str):
    """Id of a session. The session lasts as long as this object; `terminate_session` ends it earlier."""

    def __new__(cls) -> Session:
        """Create a session with a random id."""
        return super().__new__(cls, uuid.uuid4().hex)


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
        state: the replica's state.
        total_requests: number of calls made.
        failed_requests: number of calls that raised.
        in_flight: number of calls in progress.
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


@dataclass(slots=True)
class ServiceMetrics:
    """Metrics of a service.

    Attributes:
        replicas: metrics of each replica, by its number.
        total_sessions: number of open sessions.
        healthy_replicas: number of replicas that can be called.
        total_replicas: number of all replicas.
        queued: number of calls that wait for a replica.
        repeated: number of calls repeated because their replica died.
        refused: number of calls rejected because the queue was full.
    """

    replicas: dict[int, ReplicaMetrics]
    total_sessions: int
    healthy_replicas: int
    total_replicas: int
    queued: int = 0
    repeated: int = 0
    refused: int = 0


@dataclass(eq=False, slots=True)
class Replica:
    """One actor of a service, restarted when it ends; each start begins a new life.

    Attributes:
        number: index among the service's replicas.
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
        death = self.death
        if self.actor is None or death is None:
            raise ActorDiedError("it is started again just now")
        call = asyncio.ensure_future(agreed(getattr(self.actor, endpoint).call(*args, **kwargs)))
        try:
            await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                if isinstance(call.exception(), ActorDiedError):
                    await asyncio.wait([death], timeout=TOLD_S)
                return call.result()
            why = None if death.cancelled() else death.exception()
            raise ActorDiedError(str(why or "it was stopped")) from why
        finally:
            call.cancel()


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """An endpoint of a service: `route` calls it on one replica, `fanout` on all."""

    service: Service
    name: str
    session: object = None
    prefix: Hashable = None
    keep: bool = False

    def using(self, *, session: object = None, prefix: Hashable = None, keep: bool = False) -> ServiceEndpoint:
        """Return this endpoint with call options.

        Args:
            session: session that `route` belongs to; default: that of the enclosing `async with service.session()`.
            prefix: beginning of the call's input; `route` sends equal ones to the same replica, which has them cached.
            keep: the `fanout` call is part of the service's state: a replica that starts later gets the last such call
                of this endpoint too. If a replica raises, the previous call stays the last one. If no replica is up,
                `fanout` waits for one.

        Raises:
            UsageError: the session can't be weakly referenced or hashed, or the prefix can't be hashed.
        """
        try:
            hash(prefix)
        except TypeError as error:
            raise UsageError(
                f"{self.name}: a prefix must be hashable: {error}", fix="pass a tuple, a string or a hash of it"
            ) from error
        if session is not None:
            try:
                hash(weakref.ref(session))
            except TypeError as error:
                raise UsageError(
                    f"{self.name}: a session must be an object of its own that can be hashed: {error}",
                    fix="pass what start_session() returned",
                ) from error
        return ServiceEndpoint(self.service, self.name, session, prefix, keep)

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call one healthy replica; waits while there is none or all are busy.

        Raises:
            ActorDiedError: the replica died, and the endpoint is not `repeatable` or was repeated too often.
            ServiceDownError: no replica is left.
            ServiceOverloadedError: the queue of waiting calls is full.
        """
        return await self.service._route(self, args, kwargs)

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call every healthy replica and return their results in order; replicas that die during the call are left out.

        Raises:
            Exception: the error of the first replica, in order, whose endpoint raised.
            ServiceDownError: with `keep`, no replica is left.
        """
        results = await self.service._fanout(self, args, kwargs)
        for value in results:
            if isinstance(value, BaseException) and not isinstance(value, ActorDiedError):
                raise value
        return [value for value in results if not isinstance(value, BaseException)]

    def __getattr__(self, verb: str) -> Any:
        raise NotImplementedError(
            f"{self.name}.{verb}: an endpoint of a service has .{self.name}.route(...), which calls one replica, and "
            f".{self.name}.fanout(...), which calls all; .call, .call_one, .choose and .broadcast are those of an actor"
        )


class Service:
    """Replicas of `actor_class`, each constructed with `args` and `kwargs`; see the module's docstring.

    Attributes:
        replicas: all replicas.
        failure: future that fails with the error of the first replica that is given up.
    """

    def __init__(self, actor_class: Any, *args: Any, **kwargs: Any) -> None:
        self._class, self._args, self._kwargs = actor_class, args, kwargs
        self.name: str = actor_class.mesh_name or actor_class.__name__.lower()
        self.options: ServiceOptions = actor_class.service
        self.replicas = [Replica(number) for number in range(actor_class.num_replicas)]
        self.router = Router(len(self.replicas), self.options.slack)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._kept: dict[str, tuple[int, tuple[Any, ...], dict[str, Any]]] = {}
        """The last kept call of each endpoint: its sequence number and arguments."""
        self._keeping: set[asyncio.Task[Any]] = set()
        """Calls in progress that may become kept calls."""
        self._numbers = itertools.count(1)
        self._lives: list[asyncio.Task[None]] = []
        self._repeated = self._refused = 0

    @cached_property
    def _endpoints(self) -> frozenset[str]:
        return frozenset(self._class.endpoints())

    def __getattr__(self, name: str) -> ServiceEndpoint:
        if name.startswith("_") or name not in self._endpoints:
            raise AttributeError(f"{type(self).__name__} has no attribute and its actor no endpoint {name!r}")
        return ServiceEndpoint(self, name)

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
        """Stop every replica; waiting calls and those in progress fail with `ServiceDownError`."""
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        if self._class.spare is not None:
            await self._class.spare.close()
        self._wake()
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()  # retrieved, so that asyncio doesn't log it

    async def launch(self, replica: Replica) -> Any:
        """Start the processes and the actor of a replica's next life; override it to start replicas differently."""
        return await self._class.launch(*self._args, **self._kwargs)

    async def set_up(self, replica: Replica) -> None:
        """Set up a launched replica and replay the kept calls on it; override it to add steps.

        Calls that become kept during this are replayed too: otherwise this replica would miss them.
        """
        await replica.call("setup")
        replayed: dict[str, int] = {}
        while True:
            while self._keeping:  # the other replicas decide whether these calls are kept
                await asyncio.wait(self._keeping)
            missing = {name: call for name, call in self._kept.items() if call[0] != replayed.get(name)}
            if not missing:
                return
            for name, (number, args, kwargs) in missing.items():
                await replica.call(name, *args, **kwargs)
                replayed[name] = number

    def changed(self, replica: Replica) -> None:
        """Called after a replica's state has changed; override it to observe states."""

    async def _live(self, replica: Replica, first: asyncio.Future[None]) -> None:
        """Run one replica: start it, and restart it after each death until it is given up or stopped."""
        try:
            while True:
                why = await self._one_life(replica, first)
                if not first.done():
                    first.set_exception(self._named(replica, why))
                    return
                replica.metrics.deaths += 1
                replica.deaths_in_a_row += 1
                died = time.perf_counter()
                if replica.deaths_in_a_row >= self.options.max_deaths:
                    raise why
                self._enter(replica, ReplicaState.RECOVERING)
                cause = None if isinstance(why, ForgeError) else why
                logger.warning("%s %d ended and is started again: %s", self.name, replica.number, why, exc_info=cause)
                await self._bury(replica)
                await asyncio.sleep(self._backoff(replica.deaths_in_a_row))
                replica.metrics.down_s += time.perf_counter() - died
        except Exception as error:  # noqa: BLE001 - any error that ended its last life
            logger.error("%s %d is given up: %s", self.name, replica.number, error)
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

    def _backoff(self, deaths: int) -> float:
        return min(self.options.backoff_s * 2.0 ** (deaths - 1), MOST_BACKOFF_S) * random.uniform(0.5, 1.0)

    async def _bury(self, replica: Replica, *, dead: bool = True) -> None:
        actor, replica.actor, death, replica.death = replica.actor, None, replica.death, None
        if death is not None:
            death.cancel()
            await asyncio.gather(death, return_exceptions=True)
        if actor is not None:
            await self._class.shutdown(actor, dead=dead)

    def _named(self, replica: Replica, why: Exception) -> Exception:
        """Add the replica's name to an `ActorDiedError`; other errors, raised by `setup`, are returned unchanged."""
        if not isinstance(why, ActorDiedError):
            return why
        return ActorDiedError(f"{self.name} {replica.number} died while it was started: {why}", fix=why.fix)

    def _given_up(self, replica: Replica, error: Exception) -> ForgeError:
        failure = ServiceDownError(
            f"{self.name} {replica.number} died {replica.metrics.deaths} times and is given up: {error}",
            fix="see run.log for what ended it",
        )
        failure.__cause__ = error
        return failure

    def _enter(self, replica: Replica, state: ReplicaState) -> None:
        replica.metrics.state = state
        self.changed(replica)
        self._wake()

    # --- calls

    async def _route(self, endpoint: ServiceEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attempt = 0
        while True:
            replica = await self._acquire(endpoint)
            attempt += 1
            try:
                return await self._call(replica, endpoint.name, args, kwargs)
            except ActorDiedError as error:
                self._check_alive()
                if endpoint.name not in self._class.repeatable:
                    raise ActorDiedError(
                        f"{self.name} {replica.number} died during {endpoint.name!r}, which is not repeated elsewhere "
                        f"since it may have been carried out: {error}",
                        fix=f"name {endpoint.name!r} in {self._class.__name__}.repeatable if it may be made twice",
                    ) from error
                if attempt > self.options.repeats:
                    raise
                self._repeated += 1
            finally:
                self.router.done(replica.number)
                self._wake(1)

    async def _fanout(self, endpoint: ServiceEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if not endpoint.keep:
            return await self._call_healthy(endpoint.name, args, kwargs)
        while True:
            await self._one_healthy()
            keeping = asyncio.create_task(self._keep(next(self._numbers), endpoint.name, args, kwargs))
            self._keeping.add(keeping)
            results = await asyncio.shield(keeping)  # if cancelled here, replicas still carry it out
            if not all(isinstance(value, ActorDiedError) for value in results):
                return results

    async def _keep(self, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call every healthy replica, and keep the call if at least one carried it out and none raised.

        A call is not kept if a later one of the same endpoint already is.
        """
        try:
            results = await self._call_healthy(name, args, kwargs)
            answers = [value for value in results if not isinstance(value, ActorDiedError)]
            refused = any(isinstance(value, BaseException) for value in answers)
            if answers and not refused and number > self._kept.get(name, (0,))[0]:
                self._kept[name] = number, args, kwargs
            return results
        finally:
            self._keeping.remove(asyncio.current_task())  # type: ignore[arg-type]

    async def _call_healthy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call the endpoint of every healthy replica; returns its results, with errors as values."""
        calls = [self._call(replica, name, args, kwargs) for replica in self.replicas if replica.healthy]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _one_healthy(self) -> None:
        """Wait until a replica is healthy."""
        waited = False
        while not any(replica.healthy for replica in self.replicas):
            self._check_alive()
            await self._wait(again=waited)
            waited = True

    async def _call(self, replica: Replica, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        metrics, began = replica.metrics, time.perf_counter()
        metrics.total_requests += 1
        metrics.in_flight += 1
        try:
            return await replica.call(name, *args, **kwargs)
        except Exception:  # counted, then raised in the caller
            metrics.failed_requests += 1
            raise
        finally:
            metrics.in_flight -= 1
            metrics.seconds += time.perf_counter() - began

    async def call_all(self, function: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call an endpoint of every replica by name; the result is None for replicas that are not healthy or failed."""
        replicas = [replica for replica in self.replicas if replica.healthy]
        results = await self._fanout(ServiceEndpoint(self, function), args, kwargs)
        by_number = {each.number: value for each, value in zip(replicas, results, strict=True)}
        values = [by_number.get(replica.number) for replica in self.replicas]
        return [None if isinstance(value, BaseException) else value for value in values]

    async def _acquire(self, endpoint: ServiceEndpoint) -> Replica:
        """Wait for a replica with room for one more call; waiting calls are served in order of arrival."""
        session = SESSIONS.get().get(self) if endpoint.session is None else endpoint.session
        waited = False
        while True:
            healthy = [replica.number for replica in self.replicas if replica.healthy]
            free = [number for number in healthy if self.router.in_flight[number] < self.options.max_in_flight]
            if free and (waited or not self._waiting):
                try:
                    return self.replicas[self.router.choose(free, session, endpoint.prefix)]
                except BaseException:  # from hashing a session or prefix; give the turn to the next call
                    self._wake(1)
                    raise
            self._check_alive()
            if not waited and len(self._waiting) >= self.options.max_queue:
                self._refused += 1
                raise ServiceOverloadedError(
                    f"{len(self._waiting)} calls wait for {self.name} already",
                    fix="ask for less at once, or raise ServiceOptions.max_queue",
                )
            await self._wait(again=waited)
            waited = True

    def _check_alive(self) -> None:
        states = {replica.metrics.state for replica in self.replicas}
        if states <= {ReplicaState.FAILED, ReplicaState.STOPPED}:
            why = self.failure.exception() if self.failure.done() and not self.failure.cancelled() else None
            raise ServiceDownError(f"{self.name} has no replica left" + (f": {why}" if why else "")) from why

    async def _wait(self, *, again: bool) -> None:
        turn = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if again else self._waiting.append)(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had been woken: wake the next one instead
                self._wake(1)
            raise

    def _wake(self, count: int | None = None) -> None:
        """Wake the first `count` waiting calls, in order, so that they try again; None: all of them."""
        count = len(self._waiting) if count is None else count
        turns: list[asyncio.Future[None]] = []
        while self._waiting and len(turns) < count:
            turn = self._waiting.popleft()
            if not turn.done():
                turns.append(turn)
        for turn in turns:
            turn.set_result(None)

    # --- sessions and metrics

    async def start_session(self) -> Session:
        """Start a session: calls made with `using(session=...)` go to one replica while that lives."""
        return Session()

    async def terminate_session(self, session: Session) -> None:
        """End a session."""
        self.router.forget(session)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A session: calls made inside go to one replica, and to another only if that dies."""
        session = await self.start_session()
        token = SESSIONS.set({**SESSIONS.get(), self: session})
        try:
            yield session
        finally:
            SESSIONS.reset(token)
            await self.terminate_session(session)

    async def get_metrics(self) -> ServiceMetrics:
        """Return the metrics of the service and of each replica."""
        return ServiceMetrics(
            replicas={replica.number: replica.metrics for replica in self.replicas},
            total_sessions=len(self.router.sessions),
            healthy_replicas=sum(replica.healthy for replica in self.replicas),
            total_replicas=len(self.replicas),
            queued=len(self._waiting),
            repeated=self._repeated,
            refused=self._refused,
        )

    async def get_metrics_summary(self) -> dict[str, Any]:
        """Return the metrics as plain values: `service`, and `replicas` by number."""
        values = asdict(await self.get_metrics())
        replicas = {number: {**each, "state": each["state"].value} for number, each in values.pop("replicas").items()}
        return {"service": values, "replicas": replicas}
