"""The list of runs: searched, sorted by a column, and cut into pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from forge_env.view.runs import Figures, Runs

MOST_SORTED = 1_000
"""Maximum runs, the newest, that a search or an order by a column covers."""
PAGE = 50
NEWEST = "-changed"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the list."""

    name: str
    figures: Figures
    state: str
    age: float | None
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Listing:
    """A page of the list."""

    rows: list[Row]
    total: int
    after: str
    """The name after which the next page begins; empty on the last page."""
    cut: int
    """Number of entries that were read if the folder has more of them, else 0."""
    partial: bool
    """Whether the search or the order covers only the newest runs."""


COLUMNS: Mapping[str, Callable[[Row], Any]] = {
    "run": lambda row: row.name.casefold(),
    "state": lambda row: row.state,
    "progress": lambda row: row.figures.steps,
    "score": lambda row: row.figures.end,
    "speed": lambda row: row.figures.tokens_per_s,
    "wall": lambda row: row.figures.wall_s,
    "changed": lambda row: None if row.age is None else -row.age,
}
"""Value by which a column sorts; rows without one come last in both directions."""
ASCENDING = ("run", "state")
"""Columns whose first click sorts upwards."""


@dataclass(frozen=True, slots=True)
class Order:
    """Search and order of a list, as given in its address: `?q=coding&sort=-score`; `-` sorts downwards."""

    q: str = ""
    sort: str = NEWEST

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Order:
        """Parse the query of an address; an unknown column is ignored."""
        sort = query.get("sort", "")
        known = sort.removeprefix("-") in COLUMNS
        return cls(query.get("q", "").strip()[:200], sort if known else NEWEST)

    @property
    def column(self) -> str:
        """Column that the list is sorted by."""
        return self.sort.removeprefix("-")

    @property
    def direction(self) -> str:
        """Either `ascending` or `descending`."""
        return "descending" if self.sort.startswith("-") else "ascending"

    @property
    def newest_first(self) -> bool:
        """Whether the list is in its default order, without a search."""
        return self == Order()

    def by(self, column: str) -> str:
        """Format the query that sorts by a column; if the list is sorted by it already, the other way round."""
        sort = column if column in ASCENDING else f"-{column}"
        if column == self.column:
            sort = column if self.sort.startswith("-") else f"-{column}"
        return replace(self, sort=sort).query()

    def query(self, after: str = "") -> str:
        """Format the address's query, for the page after a run if one is given."""
        values = {"q": self.q, "sort": "" if self.sort == NEWEST else self.sort, "after": after}
        encoded = (
            f"{name}={quote(value.encode('utf-8', 'surrogateescape'), safe='')}"
            for name, value in values.items()
            if value
        )
        return "/?" + "&".join(encoded)


def page_of(runs: Runs, order: Order, after: str = "") -> Listing:
    """Return a page of the list."""
    names, cut = runs.names()
    partial = False
    if not order.newest_first:
        partial = len(names) > MOST_SORTED
        rows = {row.name: row for row in _rows(runs, names[:MOST_SORTED]) if _matches(row, order.q)}
        value = COLUMNS[order.column]
        known = [row for row in rows.values() if value(row) is not None]
        known.sort(key=value, reverse=order.direction == "descending")
        names = [*dict.fromkeys([*(row.name for row in known), *rows])]
    start = names.index(after) + 1 if after in names else 0
    page = names[start : start + PAGE]
    shown = [*_rows(runs, page)] if order.newest_first else [rows[name] for name in page]
    return Listing(shown, len(names), page[-1] if start + PAGE < len(names) else "", cut, partial)


def _rows(runs: Runs, names: Iterable[str]) -> Iterator[Row]:
    for name in names:
        if (run := runs.get(name)) is not None:  # not removed meanwhile
            yield Row(name, runs.figures(run), run.state, run.age, run.problems)


def _matches(row: Row, text: str) -> bool:
    """Whether every word of a text is part of the run's name, environment, model, method or state."""
    shown = " ".join([row.name, row.figures.environment, row.figures.model, row.figures.method, row.state])
    return all(word in shown.casefold() for word in text.casefold().split())
