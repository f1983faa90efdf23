"""The list of runs: searched, sorted by a column, and cut into pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from forge_env.view.runs import Figures, Listing, Runs, RunView

MOST_SORTED = 1_000
"""Maximum runs, the newest, that a search or an order by a column covers."""
PAGE = 50
NEWEST = "-changed"


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of the list."""

    run: RunView
    figures: Figures
    state: str
    age: float | None
    problems: list[str]


COLUMNS: Mapping[str, Callable[[Listed], Any]] = {
    "run": lambda row: row.run.name.casefold(),
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


def page_of(runs: Runs, order: Order, after: str = "") -> tuple[list[Listed], Listing]:
    """Return a page of the list, and what is known of the whole list."""
    if order.newest_first:
        listing = runs.names(after, PAGE)
        return [row for name in listing.names if (row := _row(runs, name)) is not None], listing
    newest = runs.names(most=MOST_SORTED)
    rows = [row for name in newest.names if (row := _row(runs, name)) is not None and _matches(row, order.q)]
    key = COLUMNS[order.column]
    known = sorted((row for row in rows if key(row) is not None), key=key, reverse=order.direction == "descending")
    rows = known + [row for row in rows if key(row) is None]
    names = [row.run.name for row in rows]
    start = names.index(after) + 1 if after in names else 0
    page = rows[start : start + PAGE]
    end = names[start + len(page) - 1] if start + len(page) < len(rows) else ""
    return page, Listing(names[start : start + PAGE], len(rows), end, newest.by_name, newest.cut, bool(newest.after))


def _row(runs: Runs, name: str) -> Listed | None:
    run, figures = runs.get(name), runs.figures(name)
    if run is None or figures is None:  # removed meanwhile
        return None
    return Listed(run, figures, run.state, runs.age(name), run.problems)


def _matches(row: Listed, text: str) -> bool:
    """Whether every word of a text is part of the run's name, environment, model, method or state."""
    shown = " ".join([row.run.name, row.figures.environment, row.figures.model, row.figures.method, row.state])
    return all(word in shown.casefold() for word in text.casefold().split())
