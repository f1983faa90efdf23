"""What the pages ask of a run's index: lists, counts, groups, failures, changes."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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
"""Rows of a list."""
BINS = 10
PLACE = re.compile(r"(?:(-?[\d.e+-]{1,30}),)?(\d{1,18})", re.ASCII)
"""Value and key of a row, in an address."""
NEWEST = 5_000
"""Episodes among which a typical failure is looked for, before all are."""
OFTEN = 0.05
"""Fraction of failed episodes with the same last tool result from which it is named."""
TYPICAL = 101
"""Failures of a class of which the one of median length is typical."""


@dataclass(slots=True)
class Listed:
    """A page of a list."""

    rows: list[dict[str, Any]]
    after: str
    """Where the next page begins; empty: this is the last."""
    searched: float | None = None
    """Share of the rows that a search has looked at, where it has not looked at all."""


@dataclass(slots=True)
class Facets:
    """What may be chosen, with how many rows each choice has."""

    total: int
    outcomes: dict[str, int]
    bins: list[int]
    low: float
    """Of the first bin."""
    high: float
    """Of the last."""
    difficulties: dict[str, tuple[int, float | None]]
    """Number of episodes and mean reward."""
    tags: list[tuple[str, int]]
    tools: list[tuple[str, int]]
    kinds: list[tuple[str, int]]
    environments: list[str]


class Queries:
    """The questions, asked of one index; answers that take long are kept until the index changes.

    Args:
        index: of the run's trajectories.
        groups_of: the groups that the steps from one to another were trained on; None where that isn't known.
    """

    def __init__(
        self, index: RunIndex, groups_of: Callable[[int, int], list[str] | None] = lambda first, last: None
    ) -> None:
        self.index = index
        self._groups_of = groups_of
        self._searches = Searches(index, self.rows, self._where)
        self._changes: dict[Any, PairedDifference | None] = {}
        self._kept: dict[Any, Any] = {}
        self._of = -1

    def kept(self, key: Any, make: Any) -> Any:
        """`make()`, or what it gave for this key since the index last changed."""
        generation = self.index.generation
        if self._of != generation or len(self._kept) > 500:
            self._kept, self._of = {}, generation
        kept = self._kept  # the answer belongs to these, also where others begin meanwhile
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> list[sqlite3.Row]:
        """Run a query, which may use `:best`, `:tools` and `:often`."""
        return self.index.connection().execute(sql, {**self.constants, **(values or {})}).fetchall()

    @property
    def constants(self) -> dict[str, Any]:
        """Parameters of queries: the highest reward, whether agents have tools, and frequent last tool results of
        failed episodes."""
        found: dict[str, Any] = self.kept("constants", self._constants)
        return found

    def _constants(self) -> dict[str, Any]:
        # a call of a tool that isn't there is answered by nobody, so an episode of one turn says nothing
        question = (
            "select (select max(best) from t) as best, "
            f"(select reward from t where {VALID} order by reward desc limit 1) as seen, "
            "exists(select 1 from t where calls > 0 and turns > 1) as tools"
        )
        row = self.index.connection().execute(question).fetchone()
        best, seen = row["best"] or 1.0, row["seen"] or 0.0
        found = {"best": seen if best == 1.0 and seen > 1.0 else best, "tools": row["tools"]}
        read = f"select read, count(*) as n from t where read != '' and {VALID} and {FAILED} group by 1 order by n desc"
        counts = self.index.connection().execute(read, found).fetchall()
        least = max(2, OFTEN * sum(row["n"] for row in counts))
        return {**found, "often": json.dumps([row["read"] for row in counts if row["n"] >= least])}

    def _where(self, chosen: Filter) -> tuple[str, dict[str, Any]]:
        """A filter's condition, with what only the run knows."""
        where, values = chosen.where()
        span = span_of(chosen.step)
        if span is not None and (groups := self._groups_of(*span)) is not None:
            values["groups"] = json.dumps(groups)
        if chosen.q:
            values["found"] = self._searches.of(chosen).as_json
        return where, values

    def count(self, kind: str = "", environment: str = "") -> int:
        """How many episodes of a kind there are.

        Args:
            kind: as in a filter.
            environment: only those of this one; empty: of all.
        """
        where, values = self._where(Filter(kind=kind, environment=environment))
        sql = f"select count(*) from t where {where}"
        found: int = self.kept(("count", kind, environment), lambda: self.rows(sql, values)[0][0])
        return found

    def listed(self, chosen: Filter) -> Listed:
        """A page of the rows that a filter takes."""
        share = self._searches.look(chosen) if chosen.q else None
        rows = [*self._batch(chosen, chosen.after, PAGE + 1)]
        more = len(rows) > PAGE
        return Listed(rows[:PAGE], _place(rows[PAGE - 1], chosen) if more else "", share)

    def _batch(self, chosen: Filter, after: str, most: int) -> Iterator[dict[str, Any]]:
        yield from shown_rows(self._bare(chosen, after, most, f"*, {OUTCOME} as result"))

    def _bare(self, chosen: Filter, after: str, most: int, columns: str = "") -> list[sqlite3.Row]:
        where, values = self._where(chosen)
        column, up = SORTS[chosen.sort.removeprefix("-")], chosen.sort.startswith("-")
        order, sign = ("asc", ">") if up else ("desc", "<")
        with suppress(ValueError):
            value, key = _after(after)
            values |= {"after_key": key, "after_value": value}
            beyond = (
                f"key {sign} :after_key" if column == "key" else f"({column}, key) {sign} (:after_value, :after_key)"
            )
            where = f"{where} and {beyond}"
        if column != "key":
            where = f"{where} and {column} is not null"
        columns = columns or ("key, length" if column == "key" else f"key, length, {column}")
        sql = f"select {columns} from t where {where} order by {column} {order}, key {order} limit {most}"
        return self.rows(sql, values)

    def facets(self, chosen: Filter) -> Facets:
        """The counts of every choice; those of outcome and reward are what choosing another one would give."""
        base = replace(chosen, after="", sort="newest")
        found: Facets = self.kept(
            ("facets", base, len(self._searches.of(base).keys) if base.q else 0), lambda: self._facets(base)
        )
        return found

    def _facets(self, chosen: Filter) -> Facets:
        apart = replace(chosen, outcome="", low=None, high=None)
        where, values = self._where(apart)
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
            for tag in json.loads(row["tags"]) if row["tags"] else ():
                tags[tag] += number
            for tool in json.loads(row["tools"]) if row["tools"] else ():
                tools[tool] += number
        kinds = self.kept("kinds", lambda: [tuple(row) for row in self.rows("select kind, count(*) from t group by 1")])
        named = self.kept("environments", lambda: [row[0] for row in self.rows("select distinct environment from t")])
        return Facets(
            total=total,
            outcomes={
                name: outcomes[name] for name in OUTCOMES if outcomes[name] or name in ("paid", "unpaid", "limit")
            },
            bins=[bins[place] for place in range(BINS)],
            low=low,
            high=high,
            difficulties={str(key): (int(n), s / n) for key, (n, s) in sorted(difficulties.items())},
            tags=tags.most_common(30),
            tools=tools.most_common(20),
            kinds=kinds,
            environments=sorted(named),
        )

    def one(self, kind: str, name: str) -> dict[str, Any] | None:
        """The row of a trajectory: by id, or as `@FILE:OFFSET` where its id can't stand in an address."""
        try:
            f"{kind}{name}".encode()
        except UnicodeEncodeError:  # an address that is no text
            return None
        if name.startswith("@"):
            file, _, offset = name[1:].rpartition(":")
            if not (offset.isascii() and offset.isdigit()) or len(offset) > 15:
                return None
            sql = f"select *, {OUTCOME} as result from t where key = :key"
            number = self.rows("select number from file where name = :file", {"file": file})
            found = self.rows(sql, {"key": number[0][0] * PLACES + int(offset)}) if number else []
        else:
            sql = f"select *, {OUTCOME} as result from t where kind = :kind and id = :id"
            found = self.rows(sql, {"kind": kind, "id": name})
        return next(shown_rows(found), None)

    def neighbours(self, row: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The record before and the one behind, in the same kind."""
        values = {"kind": row["kind"], "key": row["key"]}
        before = self.rows("select * from t where +kind = :kind and key < :key order by key desc limit 1", values)
        behind = self.rows("select * from t where +kind = :kind and key > :key order by key limit 1", values)
        return next(shown_rows(before), None), next(shown_rows(behind), None)

    def group(self, kind: str, group: str) -> list[dict[str, Any]]:
        """The members of a group, in order."""
        sql = f"select *, {OUTCOME} as result from t where kind = :kind and grp = :grp order by member, key limit 200"
        return [*shown_rows(self.rows(sql, {"kind": kind, "grp": group}))]

    def failures(self, kind: str, environment: str = "") -> list[tuple[str, int, dict[str, Any] | None]]:
        """Classes of failures with how many there are, and a typical one: of median length among the newest.

        Episodes that were paid and did not solve their task stand first: the reward may not be what is wanted.

        Args:
            kind: as in a filter.
            environment: only those of this one; empty: of all.
        """
        found: list[tuple[str, int, dict[str, Any] | None]] = self.kept(
            ("failures", kind, environment), lambda: self._failures(kind, environment)
        )
        return found

    def _failures(self, kind: str, environment: str) -> list[tuple[str, int, dict[str, Any] | None]]:
        where, values = self._where(Filter(kind=kind, environment=environment))
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
        """Scores of the valid episodes of a kind by task; see `score_of`."""
        where, values = self._where(Filter(kind=kind))
        rows = shown_rows(self.rows(f"select task, reward, metrics from t where {where} and {VALID}", values))
        found = ((row["task"], score_of(row, score)) for row in rows)
        return by_task((task, value) for task, value in found if value is not None)

    def change(self, first: str, last: str, score: str) -> PairedDifference | None:
        """From the scores of one kind to those of another, task by task; None: they have no task in common.

        It is kept as long as these episodes are the same, whatever else the run adds: the test by task takes long.
        """
        sql = f"select count(*), max(key) from t where {OF_KIND}"
        there = [tuple(self.rows(sql, of_kind(kind))[0]) for kind in (first, last)]
        key = (first, last, score, *there, self.index.dropped)
        if key not in self._changes:
            if len(self._changes) > 100:
                self._changes.clear()
            self._changes[key] = compare(*(self.scores(kind, score) for kind in (first, last)))
        return self._changes[key]


def score_of(row: Mapping[str, Any], score: str) -> float | None:
    """By what an episode is measured: `reward`, or a metric; of one without the metric, the reward."""
    found = row["reward"] if score == "reward" else row["metrics"].get(score, row["reward"])
    return None if found is None else float(found)


def _place(row: Mapping[str, Any] | sqlite3.Row, chosen: Filter) -> str:
    column = SORTS[chosen.sort.removeprefix("-")]
    return str(row["key"]) if column == "key" else f"{row[column]!r},{row['key']}"


def _after(place: str) -> tuple[float, int]:
    """Value and key that `_place` told; `ValueError`: it is none."""
    found = PLACE.fullmatch(place)
    if found is None:
        raise ValueError(f"{place!r} is no place in a list")
    return float(found[1] or 0), int(found[2])
