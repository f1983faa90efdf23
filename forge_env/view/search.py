"""Looking for a text in the records of a run, newest first, a moment at a time: a run may have gigabytes."""

from __future__ import annotations

import json
import mmap
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from forge_env.reading import UnsafeFileError, open_file
from forge_env.view.filter import Filter
from forge_env.view.index import PLACES, RunIndex

SEARCHED = 1_000
"""Rows that a search asks the index for at once."""
SEARCH_S, WAIT_S = 0.2, 1.0
"""Seconds of processor time, and seconds, that a page looks for a text at most; it then offers to go on."""
MOST_SEARCHES = 8
"""Searches that are remembered."""
MOST_FOUND = 100_000
"""Episodes that a search finds; it then goes no further, and says what share it has looked at."""


@dataclass(slots=True)
class Search:
    """How far a text was looked for among some rows, newest first, and where it was found."""

    keys: list[int] = field(default_factory=list)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By file: the lowest and the highest key that were looked at, and all rows between them."""
    looked: int = 0
    done: bool = False
    """Nothing is left to look at for now."""
    as_json: str = "[]"


class Searches:
    """The searches of one run, each of which goes on where it was.

    Args:
        index: of the run's trajectories.
        rows: asks it (`Queries.rows`).
        where: a filter's condition, with what only the run knows.
    """

    def __init__(
        self,
        index: RunIndex,
        rows: Callable[[str, Mapping[str, Any]], list[sqlite3.Row]],
        where: Callable[[Filter], tuple[str, dict[str, Any]]],
    ) -> None:
        self._index, self._rows, self._where = index, rows, where
        self._searches: OrderedDict[Filter, Search] = OrderedDict()
        self._searching = threading.RLock()
        self._dropped = 0

    def of(self, chosen: Filter) -> Search:
        """What is known of where a filter's text stands, in all outcomes and rewards, so that each can be counted."""
        base = replace(chosen, outcome="", low=None, high=None, after="", sort="newest")
        with self._searching:
            if self._dropped != self._index.dropped:
                self._searches.clear()
                self._dropped = self._index.dropped
            found = self._searches.setdefault(base, Search())
            self._searches.move_to_end(base)
            while len(self._searches) > MOST_SEARCHES:
                self._searches.popitem(last=False)
            return found

    def look(self, chosen: Filter) -> float | None:
        """Look on for a filter's text for a while; the share that was looked at, or None: all was."""
        with self._searching:
            found, enough = self.of(chosen), _enough()
            base = replace(chosen, q="", outcome="", low=None, high=None)
            where, values = self._where(base)
            holds = _holder(chosen.q)
            before = len(found.keys)
            found.done = True
            with ExitStack() as stack:
                files = [row["number"] for row in self._rows("select number from file order by number desc", {})]
                for number in files:
                    if found.done and not self._look_in(number, found, holds, (where, values), enough, stack):
                        found.done = False
            if len(found.keys) > before:
                found.as_json = json.dumps(found.keys)
            if found.done:
                return None
            total = self._rows(f"select count(*) from t where {where}", values)[0][0]
            return min(found.looked / total, 0.99) if total else 0.99

    def _look_in(
        self,
        number: int,
        found: Search,
        holds: Callable[[bytes], bool],
        condition: tuple[str, dict[str, Any]],
        enough: Callable[[], bool],
        stack: ExitStack,
    ) -> bool:
        """Look at the rows of one file: those that came since, then on towards its beginning. Whether that is all."""
        if len(found.keys) >= MOST_FOUND:
            return False
        where, values = condition
        start, end = number * PLACES, (number + 1) * PLACES - 1
        text: mmap.mmap | None = None
        low, high = found.spans.get(number, (end, end))
        sides = [(high + 1, end, "asc"), (start, low - 1, "desc")] if number in found.spans else [(start, end, "desc")]
        for first, last, order in sides:
            while True:
                sql = f"select key, length from t where {where} and key between :from and :to order by key {order}"
                batch = self._rows(f"{sql} limit {SEARCHED}", {**values, "from": first, "to": last})
                for place, row in enumerate(batch):
                    text = text or self._map(row["key"], stack)
                    offset = row["key"] % PLACES
                    if text is not None and holds(text[offset : offset + row["length"]]):
                        found.keys.append(row["key"])
                    found.looked += 1
                    low, high = min(low, row["key"]), row["key"] if high == end else max(high, row["key"])
                    found.spans[number] = (low, high)
                    if len(found.keys) >= MOST_FOUND:
                        return False
                    if place % 20 == 19 and enough():
                        return False
                if len(batch) < SEARCHED:
                    break
                first, last = (high + 1, end) if order == "asc" else (start, low - 1)
                if enough():
                    return False
        return True

    def _map(self, key: int, stack: ExitStack) -> mmap.mmap | None:
        try:
            file = stack.enter_context(open_file(self._index.place(key)[0]))
            return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError, LookupError, UnsafeFileError):
            return None  # it is gone


def _enough() -> Callable[[], bool]:
    """Tells when a page has looked for long enough."""
    worked, until = time.thread_time() + SEARCH_S, time.perf_counter() + WAIT_S
    return lambda: time.thread_time() >= worked or time.perf_counter() >= until


def _holder(text: str) -> Callable[[bytes], bool]:
    """Whether a record holds a text, in capitals or not: as JSON has it, or as JSON within JSON (arguments)."""
    once = json.dumps(text.lower(), ensure_ascii=False)[1:-1]
    twice = json.dumps(once, ensure_ascii=False)[1:-1]
    forms = [*dict.fromkeys([once, twice, json.dumps(text.lower())[1:-1]])]
    needles = [form.encode("utf-8", "replace") for form in forms]

    def holds(record: bytes) -> bool:
        # bytes know the capitals of ASCII only
        record = record.lower() if text.isascii() else record.decode("utf-8", "replace").lower().encode()
        for needle in needles:
            at = record.find(needle)
            if at >= 0:
                ids = record.rfind(b'"tokens":{"ids":"')  # numbers, which hold any short text
                if ids < 0 or at < ids:
                    return True
        return False

    return holds
