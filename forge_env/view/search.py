"""Text search in the records of a run, newest first, in short slices of time, since a run may have gigabytes."""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forge_env.reading import UnsafeFileError, open_file
from forge_env.view.filter import Filter
from forge_env.view.index import PLACES

if TYPE_CHECKING:
    from forge_env.view.queries import Queries

SEARCH_S, WAIT_S = 0.2, 1.0
"""Seconds of processor time, and of wall time, that a page searches at most before it offers to continue."""
MOST_SEARCHES = 8
"""Maximum searches that are remembered."""
MOST_FOUND = 100_000
"""Maximum episodes that a search finds; it then stops, and the page shows the share it has covered."""


@dataclass(slots=True)
class Search:
    """Progress and results of a search among some rows, newest first."""

    keys: list[int] = field(default_factory=list)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By file: the lowest and the highest searched key; all rows between them have been searched."""
    looked: int = 0
    as_json: str = "[]"


class Searches:
    """The searches of one run, each of which can be continued."""

    def __init__(self, queries: Queries) -> None:
        self._queries, self._index = queries, queries.index
        self._searches: OrderedDict[Filter, Search] = OrderedDict()
        self._searching = threading.RLock()
        self._dropped = 0

    def of(self, chosen: Filter) -> Search:
        """Return the search for a filter's text among all outcomes and rewards, so that each of them can be counted."""
        base = replace(chosen, outcome="", low=None, high=None, after="", sort="newest")
        with self._searching:
            if self._dropped != self._index.dropped:
                self._searches.clear()
                self._dropped = self._index.dropped
            search = self._searches.setdefault(base, Search())
            self._searches.move_to_end(base)
            while len(self._searches) > MOST_SEARCHES:
                self._searches.popitem(last=False)
            return search

    def look(self, chosen: Filter) -> float | None:
        """Continue the search for a filter's text; return the share of rows that was searched, or None if all were."""
        with self._searching:
            search, enough = self.of(chosen), _enough()
            where, values = self._queries.where(replace(chosen, q="", outcome="", low=None, high=None))
            holds, before = _holder(chosen.q), len(search.keys)
            files = self._queries.rows("select number from file order by number desc")
            with ExitStack() as stack:
                done = all(self._look_in(file[0], search, holds, (where, values), enough, stack) for file in files)
            if len(search.keys) > before:
                search.as_json = json.dumps(search.keys)
            if done:
                return None
            total = self._queries.rows(f"select count(*) from t where {where}", values)[0][0]
            return min(search.looked / total, 0.99) if total else 0.99

    def _look_in(
        self,
        number: int,
        found: Search,
        holds: Callable[[bytes], bool],
        condition: tuple[str, dict[str, Any]],
        enough: Callable[[], bool],
        stack: ExitStack,
    ) -> bool:
        """Search the rows of one file, new ones first, then earlier ones; return whether all were searched."""
        where, values = condition
        start, end = number * PLACES, (number + 1) * PLACES - 1
        text: mmap.mmap | None = None
        low, high = found.spans.get(number, (end, end))
        sides = [(high + 1, end, "asc"), (start, low - 1, "desc")] if number in found.spans else [(start, end, "desc")]
        for first, last, order in sides:
            sql = f"select key, length from t where {where} and key between :from and :to order by key {order}"
            for index, row in enumerate(self._queries.each(sql, {**values, "from": first, "to": last})):
                if len(found.keys) >= MOST_FOUND or (index % 20 == 19 and enough()):
                    return False
                text = text or self._map(row["key"], stack)
                offset = row["key"] % PLACES
                if text is not None and holds(text[offset : offset + row["length"]]):
                    found.keys.append(row["key"])
                found.looked += 1
                low, high = min(low, row["key"]), row["key"] if high == end else max(high, row["key"])
                found.spans[number] = (low, high)
        return True

    def _map(self, key: int, stack: ExitStack) -> mmap.mmap | None:
        try:
            file = stack.enter_context(open_file(self._index.place(key)[0]))
            return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError, LookupError, UnsafeFileError):
            return None  # the file has been removed


def _enough() -> Callable[[], bool]:
    """Return a function that is true when a page has searched for long enough."""
    worked, until = time.thread_time() + SEARCH_S, time.perf_counter() + WAIT_S
    return lambda: time.thread_time() >= worked or time.perf_counter() >= until


def _holder(text: str) -> Callable[[bytes], bool]:
    """Return a function for whether a record contains a text, ignoring case.

    The text may be encoded as JSON, or as JSON within JSON (arguments).
    """
    once = json.dumps(text.lower(), ensure_ascii=False)[1:-1]
    twice = json.dumps(once, ensure_ascii=False)[1:-1]
    forms = [*dict.fromkeys([once, twice, json.dumps(text.lower())[1:-1]])]
    needles = [form.encode("utf-8", "replace") for form in forms]

    def holds(record: bytes) -> bool:
        # bytes.lower() only handles ASCII
        record = record.lower() if text.isascii() else record.decode("utf-8", "replace").lower().encode()
        for needle in needles:
            at = record.find(needle)
            if at >= 0:
                ids = record.rfind(b'"tokens":{"ids":"')  # numbers, which would match any short text
                if ids < 0 or at < ids:
                    return True
        return False

    return holds
