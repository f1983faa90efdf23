"""Queries of a run's index for the pages: lists, counts, groups, failures, changes."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from forge_env.evaluation.estimates import PairedDifference, by_task, compare
from forge_env.view.filter import (
    ENDING,
    FAILED,
    OF_KIND,
    OUTCOME,
    OUTCOMES,
    PAID_UNSOLVED,
    SORTS,
    VALID,
    Filter,
    of_kind,
    span_of,
    takes,
)
from forge_env.view.index import PLACES, RunIndex, shown_rows
from forge_env.view.search import Searches

PAGE = 50
"""Rows on a page of a list."""
BINS = 10
PLACE = re.compile(r"(?:(-?\d+(?:\.\d+)?(?:e[+-]\d+)?),)?(\d{1,18})", re.ASCII)
"""Value and key of a row, in an address."""
NEWEST = 5_000
"""Number of newest episodes to search first for a typical failure, before all are searched."""
OFTEN = 0.05
"""Fraction of failed episodes with the same last tool result from which that result is part of the failure's name."""
TYPICAL = 101
"""Number of failures of a class, of which the one of median length is shown as typical."""


@dataclass(slots=True)
class Listed:
    """A page of a list."""

    rows: list[dict[str, Any]]
    after: str
    """Start of the next page; empty: this is the last."""
    searched: float | None = None
    """Share of the rows that a search has covered; None: all."""


@dataclass(slots=True)
class Facets:
    """The possible choices of each filter, with the number of matching rows."""

    total: int
    outcomes: dict[str, int]
    bins: list[int]
    low: float
    """Lower bound of the first bin."""
    high: float
    """Upper bound of the last bin."""
    difficulties: dict[str, tuple[int, float | None]]
    """Number of episodes and mean reward."""
    tags: list[tuple[str, int]]
    tools: list[tuple[str, int]]
    kinds: list[tuple[str, int]]
    environments: list[str]


class Queries:
    """Queries of one index; slow results are cached until the index changes.

    Args:
        groups_of: returns the groups that a range of steps, first to last, was trained on; None if unknown.
    """

    def __init__(
        self, index: RunIndex, groups_of: Callable[[int, int], list[str] | None] = lambda first, last: None
    ) -> None:
        self.index = index
        self._groups_of = groups_of
        self._searches = Searches(self)
        self._changes: dict[Any, PairedDifference | None] = {}
        self._kept: dict[Any, Any] = {}
        self._of = -1

    def kept(self, key: Any, make: Any) -> Any:
        """Return the cached result for this key, calling `make` if the index has changed since."""
        generation = self.index.generation
        if self._of != generation or len(self._kept) > 500:
            self._kept, self._of = {}, generation
        cached = self._kept  # even if another thread replaces it for a newer generation meanwhile
        if key not in cached:
            cached[key] = make()
        return cached[key]

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> list[sqlite3.Row]:
        """Run a query, which may use `:best`, `:tools` and `:often`."""
        return self.each(sql, values).fetchall()

    def each(self, sql: str, values: Mapping[str, Any] | None = None) -> sqlite3.Cursor:
        """Run a query, as `rows`, and read its rows one after another."""
        return self.index.connection().execute(sql, {**self.constants, **(values or {})})

    @property
    def constants(self) -> dict[str, Any]:
        """Query parameters: highest reward, whether agents have tools, and frequent last tool results of failures."""
        result: dict[str, Any] = self.kept("constants", self._constants)
        return result

    def _constants(self) -> dict[str, Any]:
        # a call of an unknown tool gets no answer, so an episode of one turn does not show whether tools exist
        question = (
            "select (select max(best) from t) as best, "
            f"(select reward from t where {VALID} order by reward desc limit 1) as seen, "
            "exists(select 1 from t where calls > 0 and turns > 1) as tools"
        )
        row = self.index.connection().execute(question).fetchone()
        best, seen = row["best"] or 1.0, row["seen"] or 0.0
        values = {"best": seen if best == 1.0 and seen > 1.0 else best, "tools": row["tools"]}
        read = f"select read, count(*) as n from t where read != '' and {VALID} and {FAILED} group by 1 order by n desc"
        counts = self.index.connection().execute(read, values).fetchall()
        least = max(2, OFTEN * sum(row["n"] for row in counts))
        return {**values, "often": json.dumps([row["read"] for row in counts if row["n"] >= least])}

    def where(self, chosen: Filter) -> tuple[str, dict[str, Any]]:
        """Return a filter's condition and its parameters, including those that depend on the run."""
        where, values = chosen.where()
        span = span_of(chosen.step)
        if span is not None and (groups := self._groups_of(*span)) is not None:
            values["groups"] = json.dumps(groups)
        if chosen.q:
            values["found"] = self._searches.of(chosen).as_json
        return where, values

    def count(self, kind: str = "", environment: str = "") -> int:
        """Count the episodes of a kind."""
        where, values = self.where(Filter(kind=kind, environment=environment))
        sql = f"select count(*) from t where {where}"
        result: int = self.kept(("count", kind, environment), lambda: self.rows(sql, values)[0][0])
        return result

    def listed(self, chosen: Filter) -> Listed:
        """Return a page of the rows that match a filter."""
        share = self._searches.look(chosen) if chosen.q else None
        where, values = self.where(chosen)
        column, up = SORTS[chosen.sort.removeprefix("-")], chosen.sort.startswith("-")
        order, sign = ("asc", ">") if up else ("desc", "<")
        if column != "key":
            where = f"{where} and {column} is not null"
        if match := PLACE.fullmatch(chosen.after):
            values |= {"after_value": float(match[1] or 0), "after_key": int(match[2])}
            beyond = "key {} :after_key" if column == "key" else f"({column}, key) {{}} (:after_value, :after_key)"
            where = f"{where} and {beyond.format(sign)}"
        sql = f"select *, {OUTCOME} as result from t where {where} order by {column} {order}, key {order}"
        rows = [*shown_rows(self.rows(f"{sql} limit {PAGE + 1}", values))]
        last = rows[PAGE - 1] if len(rows) > PAGE else None
        place = "" if last is None else str(last["key"]) if column == "key" else f"{last[column]!r},{last['key']}"
        return Listed(rows[:PAGE], place, share)

    def facets(self, chosen: Filter) -> Facets:
        """Count the rows of every choice; counts of outcomes and rewards ignore the current choice of these."""
        base = replace(chosen, after="", sort="newest")
        result: Facets = self.kept(
            ("facets", base, len(self._searches.of(base).keys) if base.q else 0), lambda: self._facets(base)
        )
        return result

    def _facets(self, chosen: Filter) -> Facets:
        apart = replace(chosen, outcome="", low=None, high=None)
        where, values = self.where(apart)
        best = self.constants["best"]
        outcomes: Counter[str] = Counter()
        bins: Counter[int] = Counter()
        low = min(0.0, self.kept("lowest", lambda: self.rows(f"select min(reward) from t where {VALID}")[0][0] or 0.0))
        high = max(best, low + 1e-9)
        width = (high - low) / BINS
        inside = replace(apart, low=chosen.low, high=chosen.high)
        difficulties: dict[int, list[float]] = {}
        tags: Counter[str] = Counter()
        tools: Counter[str] = Counter()
        total = 0
        sql = (
            f"select {OUTCOME} as result, reward, difficulty, tags, tools, count(*) as n from t where {where} "
            "group by 1, 2, 3, 4, 5"
        )
        for row in self.rows(sql, values):
            number, result, reward = row["n"], row["result"], row["reward"]
            valid = result not in ("lost", "unreadable") and reward is not None
            fits = chosen.low is None and chosen.high is None
            if not fits and valid:
                at_least = inside.low is None or reward >= inside.low - 1e-9
                fits = at_least and (inside.high is None or reward <= inside.high + 1e-9)
            failed = valid and (reward < best - 1e-9 or result == "unsolved")
            chosen_result = not chosen.outcome or result == chosen.outcome or (chosen.outcome == "failed" and failed)
            if fits:
                outcomes[result] += number
            if valid and chosen_result:
                bins[min(BINS - 1, max(0, int((reward - low) / width)))] += number
            if not (fits and chosen_result):
                continue
            total += number
            if valid:
                sums = difficulties.setdefault(row["difficulty"], [0.0, 0.0])
                sums[0] += number
                sums[1] += number * reward
            for counted, names in ((tags, row["tags"]), (tools, row["tools"])):
                for name in filter(None, json.loads(names) if names else ()):  # a call may lack its name
                    counted[name] += number
        kinds = self.kept("kinds", lambda: [tuple(row) for row in self.rows("select kind, count(*) from t group by 1")])
        named = self.kept("environments", lambda: [row[0] for row in self.rows("select distinct environment from t")])
        return Facets(
            total=total,
            outcomes={
                name: outcomes[name] for name in OUTCOMES if outcomes[name] or name in ("full", "wrong", "limit")
            },
            bins=[bins[index] for index in range(BINS)],
            low=low,
            high=high,
            difficulties={str(key): (int(n), s / n) for key, (n, s) in sorted(difficulties.items())},
            tags=tags.most_common(30),
            tools=tools.most_common(20),
            kinds=kinds,
            environments=sorted(named),
        )

    def one(self, kind: str, name: str) -> dict[str, Any] | None:
        """Find the row of a trajectory by id, or by `@FILE:OFFSET` if its id can't be part of an address."""
        try:
            f"{kind}{name}".encode()
        except UnicodeEncodeError:  # an address that is not valid text
            return None
        if name.startswith("@"):
            file, _, offset = name[1:].rpartition(":")
            if not (offset.isascii() and offset.isdigit()) or len(offset) > 15:
                return None
            sql = f"select *, {OUTCOME} as result from t where key = :key"
            number = self.rows("select number from file where name = :file", {"file": file})
            rows = self.rows(sql, {"key": number[0][0] * PLACES + int(offset)}) if number else []
        else:
            sql = f"select *, {OUTCOME} as result from t where kind = :kind and id = :id"
            rows = self.rows(sql, {"kind": kind, "id": name})
        return next(shown_rows(rows), None)

    def neighbours(self, row: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the previous and the next record of the same kind."""
        values = {"kind": row["kind"], "key": row["key"]}
        before = self.rows("select * from t where +kind = :kind and key < :key order by key desc limit 1", values)
        behind = self.rows("select * from t where +kind = :kind and key > :key order by key limit 1", values)
        return next(shown_rows(before), None), next(shown_rows(behind), None)

    def group(self, kind: str, group: str) -> list[dict[str, Any]]:
        """List the members of a group, in order."""
        sql = f"select *, {OUTCOME} as result from t where kind = :kind and grp = :grp order by member, key limit 200"
        return [*shown_rows(self.rows(sql, {"kind": kind, "grp": group}))]

    def failures(self, kind: str, environment: str = "") -> list[tuple[str, int, dict[str, Any] | None]]:
        """List failure classes with their count and a typical episode: one of median length among the newest.

        Full rewards for unsolved tasks come first: the reward may not measure the goal.
        """
        result: list[tuple[str, int, dict[str, Any] | None]] = self.kept(
            ("failures", kind, environment), lambda: self._failures(kind, environment)
        )
        return result

    def _failures(self, kind: str, environment: str) -> list[tuple[str, int, dict[str, Any] | None]]:
        where, values = self.where(Filter(kind=kind, environment=environment))
        sql = f"select {ENDING} as ending, count(*) as n from t where {where} and {FAILED} group by 1"
        counts = {row["ending"]: row["n"] for row in self.rows(sql, values)}
        classes: dict[str, list[tuple[int, int, int]]] = {}
        looked = 0
        for file in self.rows("select number, kind from file order by number desc"):
            if counts and looked < NEWEST and takes(kind, file["kind"]):
                sql = (
                    f"select {ENDING} as ending, {FAILED} as failed, tokens, turns, key from t "
                    "where key between :first and :last and :environment in ('', environment) "
                    f"order by key desc limit {NEWEST - looked}"
                )
                ends = {"first": file["number"] * PLACES, "last": (file["number"] + 1) * PLACES - 1}
                ends["environment"] = environment
                rows = self.rows(sql, ends)
                looked += len(rows)
                for row in rows:
                    if row["failed"]:
                        classes.setdefault(row["ending"], []).append((row["tokens"], row["turns"], row["key"]))
        for ending in counts.keys() - classes.keys():
            sql = f"select tokens, turns, key from t where {where} and {FAILED} and {ENDING} = :ending limit {TYPICAL}"
            classes[ending] = [tuple(row) for row in self.rows(sql, {**values, "ending": ending})]
        result = []
        for ending, number in sorted(counts.items(), key=lambda item: (item[0] != PAID_UNSOLVED, -item[1])):
            members = sorted(classes[ending][:TYPICAL])
            sql = "select * from t where key = :key"
            one = next(shown_rows(self.rows(sql, {"key": members[len(members) // 2][2]})), None) if members else None
            result.append((ending, number, one))
        return result

    def scores(self, kind: str, score: str) -> dict[str, list[float]]:
        """Return the scores of the valid episodes of a kind by task; see `score_of`."""
        where, values = self.where(Filter(kind=kind))
        rows = shown_rows(self.rows(f"select task, reward, metrics from t where {where} and {VALID}", values))
        scores = ((row["task"], score_of(row, score)) for row in rows)
        return by_task((task, value) for task, value in scores if value is not None)

    def change(self, first: str, last: str, score: str) -> PairedDifference | None:
        """Compare the scores of one kind with those of another, paired by task; None if they have no task in common.

        The result is cached as long as these episodes are the same, even if the run adds others, because the test is
        slow.
        """
        sql = f"select count(*), max(key) from t where {OF_KIND}"
        versions = [tuple(self.rows(sql, of_kind(kind))[0]) for kind in (first, last)]
        key = (first, last, score, *versions, self.index.dropped)
        if key not in self._changes:
            if len(self._changes) > 100:
                self._changes.clear()
            self._changes[key] = compare(*(self.scores(kind, score) for kind in (first, last)))
        return self._changes[key]


def score_of(row: Mapping[str, Any], score: str) -> float | None:
    """Return an episode's score: the reward, or a metric; the reward if it lacks the metric."""
    value = row["reward"] if score == "reward" else row["metrics"].get(score, row["reward"])
    return None if value is None else float(value)
