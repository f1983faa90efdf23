"""Where an actor's time goes: it does exactly one thing at any moment, so the parts sum to the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnSpan = Callable[[str, str, float, float], None]
"""Told of every finished span: actor, what it did, start and end in seconds of the clock."""


class Since:
    """Seconds by what was done, of which each call returns those that the call before has not counted."""

    __slots__ = ("_counted",)

    def __init__(self) -> None:
        self._counted: dict[str, float] = {}

    def __call__(self, seconds: dict[str, float]) -> dict[str, float]:
        """What is new in `seconds`."""
        before, self._counted = self._counted, seconds
        return {doing: value - before.get(doing, 0.0) for doing, value in seconds.items()}


class Account:
    """What one actor is doing now, and the seconds it has spent on each thing, all from one clock.

    Args:
        actor: its name.
        doing: what it does at first.
        clock: monotonic seconds.
        on_span: told of every span when it ends.
    """

    __slots__ = ("_clock", "_on_span", "_seconds", "_since_taken", "actor", "doing", "since")

    def __init__(
        self,
        actor: str,
        doing: str = "idle",
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_span: OnSpan | None = None,
    ) -> None:
        self.actor = actor
        self.doing = doing
        self.since = clock()
        self._clock = clock
        self._on_span = on_span
        self._seconds: dict[str, float] = {}
        self._since_taken = Since()

    def enter(self, doing: str) -> None:
        """From now on the actor does this."""
        now = self._clock()
        self._seconds[self.doing] = self._seconds.get(self.doing, 0.0) + now - self.since
        if self._on_span is not None and now > self.since:
            self._on_span(self.actor, self.doing, self.since, now)
        self.doing, self.since = doing, now

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Do this inside the block, and afterwards again what was done before."""
        before = self.doing
        self.enter(doing)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Seconds by what was done, up to now; they sum to the account's age."""
        now = self._clock()
        return {**self._seconds, self.doing: self._seconds.get(self.doing, 0.0) + now - self.since}

    def take(self) -> dict[str, float]:
        """As `seconds`, since the last call."""
        return self._since_taken(self.seconds())


class Accounts:
    """The sum of many short-lived accounts of one kind, such as all episodes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._open: set[Account] = set()
        self._closed: dict[str, float] = {}
        self._since_taken = Since()

    def open(self, account: Account) -> None:
        """Count `account` in, from now on."""
        self._open.add(account)

    def close(self, account: Account) -> None:
        """It has come to its end, and stays counted."""
        account.enter("done")
        self._open.discard(account)
        for doing, value in account.seconds().items():
            if doing != "done":
                self._closed[doing] = self._closed.get(doing, 0.0) + value

    @property
    def open_accounts(self) -> list[Account]:
        """Those not at their end, in no order."""
        return list(self._open)

    def seconds(self) -> dict[str, float]:
        """Seconds by what was done, summed over all."""
        seconds = dict(self._closed)
        for account in self._open:
            for doing, value in account.seconds().items():
                seconds[doing] = seconds.get(doing, 0.0) + value
        return seconds

    def take(self) -> dict[str, float]:
        """As `seconds`, since the last call."""
        return self._since_taken(self.seconds())
