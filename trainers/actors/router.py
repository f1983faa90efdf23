"""Routing of calls to replicas: by session, prompt prefix and load, with a queue, and to another one after a death.

`trainers.actors.service` routes calls of any actor with it, `trainers.generator.client` requests to generators.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from forge_env.errors import InfrastructureError

T = TypeVar("T")

PREFIXES_REMEMBERED = 4096
"""Number of recent prefixes remembered. A group's requests arrive together, and no cache holds this many prompts."""


class ServiceOverloadedError(InfrastructureError):
    """The queue of waiting calls is full."""


class Router:
    """Routes calls to replicas by session, prefix and load.

    A call goes to the replica of its session's previous call; the first call of a session goes to the replica that last
    got the same prefix. That replica has the prompt's keys and values in its cache. If it has more than `slack` calls
    more in flight than the least busy one, waiting would cost more than the cache saves: the least busy one is chosen.

    Args:
        slack: how many more calls than the least busy replica one may have in flight and still be chosen for its cache.
        max_in_flight: maximum concurrent calls per replica; other calls wait in order of arrival. None: no limit.
        max_queue: maximum number of waiting calls; the next one fails. None: no limit.

    Attributes:
        refused: number of calls that failed because the queue was full.
    """

    def __init__(
        self, replicas: int, slack: int = 16, *, max_in_flight: int | None = None, max_queue: int | None = None
    ) -> None:
        self.in_flight = [0] * replicas
        self.refused = 0
        self._slack = slack
        self._max_in_flight, self._max_queue = max_in_flight, max_queue
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        """Heap of the waiting calls in order of arrival."""
        self._arrivals = itertools.count()
        self._sessions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._prefixes: OrderedDict[Hashable, int] = OrderedDict()

    async def route(
        self,
        call: Callable[[int], Awaitable[T]],
        serving: Callable[[], Sequence[int]],
        retry: Callable[[int, Exception], None],
        *,
        session: object = None,
        prefix: Hashable = None,
    ) -> T:
        """Call a replica, and after a failure that `retry` lets pass, another one.

        Args:
            call: calls the replica with the given number.
            serving: returns the replicas to choose from; while there are none, the call waits for `wake`.
            retry: called with the replica's number and the error; raises if the call is not to be repeated.

        Raises:
            ServiceOverloadedError: the queue of waiting calls is full.
        """
        while True:
            replica = await self._acquire(serving, session, prefix)
            try:
                return await call(replica)
            except Exception as error:  # noqa: BLE001 - `retry` raises all but those that another replica may avoid
                retry(replica, error)
            finally:
                self.done(replica)

    async def _acquire(self, serving: Callable[[], Sequence[int]], session: object, prefix: Hashable) -> int:
        """Wait for a replica with room for one more call, and choose it."""
        arrival: int | None = None
        while True:
            free, limit = serving(), self._max_in_flight
            if limit is not None:
                free = [replica for replica in free if self.in_flight[replica] < limit]
            if free and (arrival is not None or limit is None or not self._waiting):
                try:
                    return self.choose(free, session, prefix)
                except BaseException:  # from hashing a session or prefix; give the turn to the next call
                    self.wake(1)
                    raise
            if arrival is None:
                if self._max_queue is not None and self.queued >= self._max_queue:
                    self.refused += 1
                    raise ServiceOverloadedError(
                        f"{self.queued} calls are already waiting for a replica",
                        fix="send fewer calls at once, or raise ServiceOptions.max_queue",
                    )
                arrival = next(self._arrivals)
            await self._turn(arrival)

    async def _turn(self, arrival: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (arrival, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had been woken: wake the next one instead
                self.wake(1)
            raise

    @property
    def queued(self) -> int:
        """Number of waiting calls."""
        return sum(not turn.done() for _, turn in self._waiting)

    def wake(self, count: int | None = None) -> None:
        """Let the first `count` waiting calls, in order of arrival, try again; None: all of them."""
        turns: list[asyncio.Future[None]] = []
        while self._waiting and (count is None or len(turns) < count):
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turns.append(turn)
        for turn in turns:
            turn.set_result(None)

    def choose(self, serving: Sequence[int], session: object = None, prefix: Hashable = None) -> int:
        """Choose the replica for a call, and count the call as in flight until `done`.

        Args:
            session: weakly referenced key of the session, which is forgotten when the object is deleted.
            prefix: beginning of the prompt; calls with equal ones go to the same replica. None: nothing to be cached.
        """
        replica = min(serving, key=self.in_flight.__getitem__)  # the least busy
        home = None if session is None else self._sessions.get(session)
        if home is None and prefix is not None:
            replica = self._at_home(self._prefixes.pop(prefix, None), replica, serving)
            self._prefixes[prefix] = replica
            if len(self._prefixes) > PREFIXES_REMEMBERED:
                self._prefixes.popitem(last=False)
        else:
            replica = self._at_home(home, replica, serving)
        if session is not None:
            self._sessions[session] = replica
        self.in_flight[replica] += 1
        return replica

    def _at_home(self, home: int | None, least_busy: int, serving: Sequence[int]) -> int:
        if home is not None and home in serving and self.in_flight[home] <= self.in_flight[least_busy] + self._slack:
            return home
        return least_busy

    def done(self, replica: int) -> None:
        """Count a call of this replica as ended, and give its place to a waiting call."""
        self.in_flight[replica] -= 1
        if self._max_in_flight is not None:
            self.wake(1)

    def forget(self, session: object) -> None:
        """Forget a session that has ended."""
        self._sessions.pop(session, None)

    @property
    def sessions(self) -> dict[object, int]:
        """Open sessions, each with its replica."""
        return dict(self._sessions)
