"""Which replica a call goes to: by conversation, by what its prompt begins with, and by load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

PREFIXES_REMEMBERED = 4096
"""Of new conversations. The members of a group come together, and no cache holds as many prompts."""


class Router:
    """Chooses replicas by session, prefix and load.

    A call of a conversation goes where the call before went, and a new conversation where the same prefix went last:
    there, its keys and values are in the cache. Where that replica has more than `slack` calls more in flight than the
    least busy one, the cache is worth less than the waiting, and the least busy one is chosen.
    """

    def __init__(self, replicas: int, slack: int = 16) -> None:
        self.in_flight = [0] * replicas
        self._slack = slack
        self._sessions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._prefixes: OrderedDict[Hashable, int] = OrderedDict()

    def choose(self, serving: Sequence[int], session: object = None, prefix: Hashable = None) -> int:
        """The replica for a call; counted as in flight until `done`.

        Args:
            serving: replicas to choose from, at least one.
            session: the conversation: an object that lives as long as it, so that it is remembered as long.
            prefix: of what is asked; equal ones belong together. None: there is nothing to be cached.
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
        """The one of these with the fewest calls in flight."""
        return min(serving, key=self.in_flight.__getitem__)

    def _at_home(self, home: int | None, least_busy: int, serving: Sequence[int]) -> int:
        if home is not None and home in serving and self.in_flight[home] <= self.in_flight[least_busy] + self._slack:
            return home
        return least_busy

    def done(self, replica: int) -> None:
        """A call of this replica has ended."""
        self.in_flight[replica] -= 1

    def forget(self, session: object) -> None:
        """A conversation is over."""
        self._sessions.pop(session, None)

    @property
    def sessions(self) -> dict[object, int]:
        """Conversations that live, each with its replica."""
        return dict(self._sessions)
