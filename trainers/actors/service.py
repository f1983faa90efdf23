"""`Service`: replicas of one actor behind one handle, restarted when they die (`trainers.actors.replicas`).

    counters = await Counter.options(num_replicas=2).as_service(0)
    await counters.add.route(1)                      # one replica, the least busy
    async with counters.session():                   # a session stays on one replica while that lives
        await counters.add.route(1)
    await counters.value.fanout()                    # every replica that is up: a list
    await counters.stop()

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
import uuid
import weakref
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from forge_env.errors import UsageError
from trainers.actors.remote import ActorDiedError
from trainers.actors.replicas import Replica, ReplicaMetrics, Replicas, ReplicaState, ServiceDownError, ServiceOptions
from trainers.actors.router import Router

__all__ = ["Service", "ServiceDownError", "ServiceEndpoint", "ServiceMetrics", "ServiceOptions", "Session"]

SESSIONS: contextvars.ContextVar[Mapping[Service, Session]] = contextvars.ContextVar("sessions", default={})  # noqa: B039 - never changed
"""Sessions that the current code runs in, at most one per service."""


class Session(str):
    """Id of a session. The session lasts as long as this object; `terminate_session` ends it earlier."""

    def __new__(cls) -> Session:
        """Create a session with a random id."""
        return super().__new__(cls, uuid.uuid4().hex)


@dataclass(slots=True)
class ServiceMetrics:
    """Metrics of a service.

    Attributes:
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
            if session is not None:
                hash(weakref.ref(session))
        except TypeError as error:
            raise UsageError(
                f"{self.name}: session and prefix must be hashable: {error}",
                fix="pass what start_session() returned, and a tuple or a string as prefix",
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


class Service(Replicas):
    """Replicas of `actor_class`, each constructed with `args` and `kwargs`; see the module's docstring.

    Attributes:
        replicas: all replicas.
        failure: future that fails with the error of the first replica that is given up.
    """

    def __init__(self, actor_class: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(actor_class, *args, **kwargs)
        options = self.options
        self.router = Router(
            len(self.replicas), options.slack, max_in_flight=options.max_in_flight, max_queue=options.max_queue
        )
        self._kept: dict[str, tuple[int, tuple[Any, ...], dict[str, Any]]] = {}
        """The last kept call of each endpoint: its sequence number and arguments."""
        self._keeping: set[asyncio.Task[Any]] = set()
        """Calls in progress that may become kept calls."""
        self._numbers = itertools.count(1)
        self._repeated = 0

    @cached_property
    def _endpoints(self) -> frozenset[str]:
        return frozenset(self._class.endpoints())

    def __getattr__(self, name: str) -> ServiceEndpoint:
        if name.startswith("_") or name not in self._endpoints:
            raise AttributeError(f"{type(self).__name__} has no attribute and its actor no endpoint {name!r}")
        return ServiceEndpoint(self, name)

    async def set_up(self, replica: Replica) -> None:
        """Set up a launched replica and replay the kept calls on it, also those that become kept meanwhile."""
        await super().set_up(replica)
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

    def notify(self) -> None:
        """Let calls that wait for a change of a replica look again."""
        super().notify()
        self.router.wake()

    # --- calls

    async def _route(self, endpoint: ServiceEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attempts = 0

        def retry(number: int, error: Exception) -> None:
            nonlocal attempts
            attempts += 1
            if not isinstance(error, ActorDiedError):
                raise error
            self._check_alive()
            if endpoint.name not in self._class.repeatable:
                raise ActorDiedError(
                    f"{self.name} {number} died during {endpoint.name!r}, which is not repeated on another replica "
                    f"because it may have had effects: {error}",
                    fix=f"name {endpoint.name!r} in {self._class.__name__}.repeatable if it may run twice",
                ) from error
            if attempts > self.options.repeats:
                raise error
            self._repeated += 1

        return await self.router.route(
            lambda number: self.replicas[number].call(endpoint.name, *args, **kwargs),
            self._serving,
            retry,
            session=SESSIONS.get().get(self) if endpoint.session is None else endpoint.session,
            prefix=endpoint.prefix,
        )

    def _serving(self) -> list[int]:
        if not (healthy := self.healthy):
            self._check_alive()
        return [replica.number for replica in healthy]

    async def _fanout(self, endpoint: ServiceEndpoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if not endpoint.keep:
            return list((await self.call_healthy(endpoint.name, *args, **kwargs)).values())
        while True:
            await self.until(lambda: bool(self._serving()))
            keeping = asyncio.create_task(self._keep(next(self._numbers), endpoint.name, args, kwargs))
            self._keeping.add(keeping)
            results = await asyncio.shield(keeping)  # if cancelled here, replicas still carry it out
            if not all(isinstance(value, ActorDiedError) for value in results):
                return results

    async def _keep(self, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call every healthy replica; keep the call if one carried it out, none raised, and no later one is kept."""
        try:
            results = list((await self.call_healthy(name, *args, **kwargs)).values())
            answers = [value for value in results if not isinstance(value, ActorDiedError)]
            refused = any(isinstance(value, BaseException) for value in answers)
            if answers and not refused and number > self._kept.get(name, (0,))[0]:
                self._kept[name] = number, args, kwargs
            return results
        finally:
            self._keeping.remove(asyncio.current_task())  # type: ignore[arg-type]

    def _check_alive(self) -> None:
        states = {replica.metrics.state for replica in self.replicas}
        if states <= {ReplicaState.FAILED, ReplicaState.STOPPED}:
            why = self.failure.exception() if self.failure.done() and not self.failure.cancelled() else None
            raise ServiceDownError(f"{self.name} has no replica left" + (f": {why}" if why else "")) from why

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
            healthy_replicas=len(self.healthy),
            total_replicas=len(self.replicas),
            queued=self.router.queued,
            repeated=self._repeated,
            refused=self.router.refused,
        )

    async def get_metrics_summary(self) -> dict[str, Any]:
        """Return the metrics as plain values: `service`, and `replicas` by number."""
        values = asdict(await self.get_metrics())
        replicas = {number: {**each, "state": each["state"].value} for number, each in values.pop("replicas").items()}
        return {"service": values, "replicas": replicas}
