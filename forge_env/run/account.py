"""Time accounts of actors: an actor does one thing at any moment, so its activities sum to the elapsed time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnSpan = Callable[[str, str, float, float], None]
"""Callback for each finished span: actor, activity, start and end in seconds of the clock."""


class Since:
    """Differences between successive readings of the seconds spent on each activity."""

    __slots__ = ("_counted",)

    def __init__(self) -> None:
        self._counted: dict[str, float] = {}

    def __call__(self, seconds: dict[str, float]) -> dict[str, float]:
        """Return, for each activity, the seconds added since the previous call."""
        before, self._counted = self._counted, seconds
        return {doing: value - before.get(doing, 0.0) for doing, value in seconds.items()}


class Account:
    """The current activity of one actor, and the seconds it has spent on each activity, all from one clock.

    Args:
        on_span: called with every span when it ends.
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
        """Switch to the activity `doing` from now on."""
        now = self._clock()
        self._seconds[self.doing] = self._seconds.get(self.doing, 0.0) + now - self.since
        if self._on_span is not None and now > self.since:
            self._on_span(self.actor, self.doing, self.since, now)
        self.doing, self.since = doing, now

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Switch to `doing` inside the block, and back to the previous activity afterwards."""
        before = self.doing
        self.enter(doing)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent on each activity up to now; they sum to the account's age."""
        now = self._clock()
        return {**self._seconds, self.doing: self._seconds.get(self.doing, 0.0) + now - self.since}

    def take(self) -> dict[str, float]:
        """Return the seconds spent on each activity since the last call."""
        return self._since_taken(self.seconds())


class Accounts:
    """The sum of many short-lived accounts of one kind, such as those of all episodes."""

    def __init__(self) -> None:
        self._open: set[Account] = set()
        self._closed: dict[str, float] = {}
        self._since_taken = Since()

    def open(self, account: Account) -> None:
        """Include `account` in the sum from now on."""
        self._open.add(account)

    def close(self, account: Account) -> None:
        """Close `account`; its seconds stay in the sum."""
        account.enter("done")
        self._open.discard(account)
        for doing, value in account.seconds().items():
            if doing != "done":
                self._closed[doing] = self._closed.get(doing, 0.0) + value

    @property
    def open_accounts(self) -> list[Account]:
        """Accounts that are not closed yet, in no particular order."""
        return list(self._open)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent on each activity, summed over all accounts."""
        seconds = dict(self._closed)
        for account in self._open:
            for doing, value in account.seconds().items():
                seconds[doing] = seconds.get(doing, 0.0) + value
        return seconds

    def take(self) -> dict[str, float]:
        """Return the seconds spent on each activity since the last call."""
        return self._since_taken(self.seconds())
