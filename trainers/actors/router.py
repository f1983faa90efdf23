"""Choice of the replica for a call, by session, prompt prefix and load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

PREFIXES_REMEMBERED = 4096
"""Number of recent prefixes remembered. A group's requests arrive together, and no cache holds this many prompts."""


class Router:
    """Chooses replicas by session, prefix and load.

    A call goes to the replica of its session's previous call; the first call of a session goes to the replica that last
    got the same prefix. That replica has the prompt's keys and values in its cache. If it has more than `slack` calls
    more in flight than the least busy one, waiting would cost more than the cache saves: the least busy one is chosen.
    """

    def __init__(self, replicas: int, slack: int = 16) -> None:
        self.in_flight = [0] * replicas
        self._slack = slack
        self._sessions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._prefixes: OrderedDict[Hashable, int] = OrderedDict()

    def choose(self, serving: Sequence[int], session: object = None, prefix: Hashable = None) -> int:
        """Choose the replica for a call, and count the call as in flight until `done`.

        Args:
            serving: replicas to choose from, at least one.
            session: weakly referenced key of the session, which is forgotten when the object is deleted.
            prefix: beginning of the prompt; calls with equal ones go to the same replica. None: nothing to be cached.
        """
        replica = self.least_busy(serving)
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

    def least_busy(self, serving: Sequence[int]) -> int:
        """Return the replica of these with the fewest calls in flight."""
        return min(serving, key=self.in_flight.__getitem__)

    def _at_home(self, home: int | None, least_busy: int, serving: Sequence[int]) -> int:
        if home is not None and home in serving and self.in_flight[home] <= self.in_flight[least_busy] + self._slack:
            return home
        return least_busy

    def done(self, replica: int) -> None:
        """Count a call of this replica as ended."""
        self.in_flight[replica] -= 1

    def forget(self, session: object) -> None:
        """Forget a session that has ended."""
        self._sessions.pop(session, None)

    @property
    def sessions(self) -> dict[object, int]:
        """Open sessions, each with its replica."""
        return dict(self._sessions)
