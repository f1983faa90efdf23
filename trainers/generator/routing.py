"""Which replica serves a request: the one that has its conversation or its prompt in the cache, unless it is busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

REMEMBERED = 8192


class Router:
    """Chooses replicas by prefix and load.

    A turn of a conversation goes where the turn before went, and a new conversation where the same prompt went
    last: there, its keys and values are in the prefix cache. Where that replica has `slack` requests more in
    flight than the least busy one, the cache is worth less than the waiting, and the least busy one is chosen.

    Args:
        replicas: how many there are.
        slack: requests that a replica may be ahead of the least busy one and still be chosen for its cache.
    """

    def __init__(self, replicas: int, slack: int = 16) -> None:
        self.in_flight = [0] * replicas
        self._slack = slack
        self._homes: OrderedDict[Hashable, int] = OrderedDict()

    def choose(self, prompt_ids: Sequence[int], session: Hashable = None) -> int:
        """The replica for a request; counted as in flight until `done`."""
        key: Hashable = ("session", session) if session is not None else None
        prompt = ("prompt", hash(tuple(prompt_ids)))
        least = min(range(len(self.in_flight)), key=self.in_flight.__getitem__)
        home = self._homes.get(key, self._homes.get(prompt))
        replica = least
        if home is not None and self.in_flight[home] <= self.in_flight[least] + self._slack:
            replica = home
        self._remember(prompt, replica)
        if key is not None:
            self._remember(key, replica)
        self.in_flight[replica] += 1
        return replica

    def done(self, replica: int) -> None:
        """A request of this replica has ended."""
        self.in_flight[replica] -= 1

    def _remember(self, key: Hashable, replica: int) -> None:
        self._homes[key] = replica
        self._homes.move_to_end(key)
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
