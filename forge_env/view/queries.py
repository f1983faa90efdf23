"""What the pages ask of a run's index: lists, counts, groups. Every filter is a value of an address."""

from __future__ import annotations

import json
import math
import mmap
import re
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from forge_env.evaluation.estimates import PairedDifference, by_task, compare
from forge_env.view.index import PLACES, RunIndex, shown_rows

PAGE = 50
"""Rows of a list."""
SEARCHED = 1_000
"""Rows that a search asks the index for at once."""
SEARCH_S, WAIT_S = 0.2, 1.0
"""Seconds of processor time, and seconds, that a page looks for a text at most; it then offers to go on."""
MOST_SEARCHES = 8
"""Searches that are remembered."""
MOST_FOUND = 100_000
"""Episodes that a search finds; it then goes no further, and says what share it has looked at."""
BINS = 10
SPAN = re.compile(r"(\d{1,12})(?:\s*-\s*(\d{1,12}))?", re.ASCII)
"""`3-9`, or one number."""
PLACE = re.compile(r"(?:(-?[\d.e+-]{1,30}),)?(\d{1,18})", re.ASCII)
"""Value and key of a row, in an address."""
OUTCOMES = ("paid", "unsolved", "partly", "unpaid", "limit", "lost", "unreadable")
SORTS = {
    "newest": "key", "reward": "reward", "tokens": "tokens", "turns": "turns", "calls": "calls", "seconds": "wall_s",
    "version": "newest",
}  # fmt: skip
"""Columns by which a list is sorted, by their name in an address; `-` before it turns the order round."""
VALID = "outcome in ('ended', 'limit')"
TRAIN = "+kind = 'train' or (+kind glob 'train-[0-9]*-*' and not +kind glob 'train-[0-9][0-9][0-9][0-9][0-9]*')"
"""Of training: not the held-out episodes of a split that is called train, which have their step behind the name. Most
episodes are, so that SQLite is kept from looking them up by kind one by one (that is what + does)."""
HELD_OUT = re.compile(r"train-\d{5}", re.ASCII)
OF_KIND = "(kind = :kind or kind glob :hosts)"
"""Of one kind, on whatever host they were played; see `of_kind`."""
PAID = "reward >= :best - 1e-9"
"""Earned all that can be earned; whether the task was solved is another question."""
UNSOLVED = f"({VALID} and {PAID} and solved < 0.5)"
"""Earned all, and less than half by what held-out episodes are measured by: the reward may not be what is wanted."""
FAILED = f"(outcome in ('lost', 'unreadable') or not {PAID} or {UNSOLVED})"
OUTCOME = (
    "case when outcome = 'lost' then 'lost' when outcome = 'unreadable' then 'unreadable' "
    f"when {UNSOLVED} then 'unsolved' when outcome = 'limit' then 'limit' when {PAID} then 'paid' "
    "when reward > 0 then 'partly' else 'unpaid' end"
)
PAID_UNSOLVED = "paid, not solved"
ENDING = (
    "case when outcome = 'lost' then 'lost: ' || why when outcome = 'unreadable' then 'unreadable' "
    f"when {UNSOLVED} then '{PAID_UNSOLVED}' "
    "when outcome = 'limit' then 'limit: ' || why when calls = 0 and :tools then 'never used a tool' "
    "when reward > 0 then 'finished, paid in part' else 'finished, unpaid' end"
)
NEWEST = 5_000
"""Episodes among which a typical failure is looked for, before all are."""
TYPICAL = 101
"""Failures of a class of which the one of median length is typical."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What a list shows, as its address says it; empty: no condition."""

    kind: str = ""
    """`train`, `held-out`, or the name of a file."""
    outcome: str = ""
    ending: str = ""
    """A class of failures; of episodes that did not earn all they could."""
    low: float | None = None
    """Rewards from here."""
    high: float | None = None
    difficulty: str = ""
    tag: str = ""
    tool: str = ""
    environment: str = ""
    task: str = ""
    group: str = ""
    id: str = ""
    """How ids begin."""
    versions: str = ""
    """Of the policy: `3-9`, or one."""
    step: str = ""
    """Training step that was trained on them: one, or `3-9`."""
    since: str = ""
    """When they began, at the earliest: `2026-11-23T14:05`, UTC."""
    until: str = ""
    """And at the latest."""
    q: str = ""
    """Text anywhere in the episode."""
    sort: str = "newest"
    after: str = ""
    """Where the page begins: value and key of the row before."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """The filter of an address; what can't be understood is no condition."""
        values: dict[str, Any] = {}
        for item in fields(cls):
            text = query.get(item.name, "").strip()
            if not text:
                continue
            if item.name in ("low", "high"):
                with suppress(ValueError):
                    value = float(text)
                    values[item.name] = value if math.isfinite(value) else None
            else:
                values[item.name] = text[:500]
        if values.get("sort", "newest").removeprefix("-") not in SORTS:
            del values["sort"]
        return cls(**values)

    def query(self, **changes: Any) -> str:
        """The address's query with these changes; a page begins anew unless `after` is among them."""
        changed = replace(self, **{"after": "", **changes})
        parts = []
        for item in fields(self):
            value = getattr(changed, item.name)
            if value not in (None, "") and value != item.default:
                text = f"{value:g}" if isinstance(value, float) else str(value)
                parts.append(f"{item.name}={quote(text.encode('utf-8', 'replace'), safe='')}")
        return "?" + "&".join(parts)

    @property
    def conditions(self) -> dict[str, str]:
        """Name and text of what is set, without search and order."""
        return {
            item.name: str(getattr(self, item.name))
            for item in fields(self)
            if item.name not in ("sort", "after", "q") and getattr(self, item.name) not in (None, "")
        }

    def where(self) -> tuple[str, dict[str, Any]]:
        """The condition as SQL, and its values."""
        found: list[str] = ["1"]
        values: dict[str, Any] = {}
        if self.kind == "train":
            found.append(f"({TRAIN})")
        elif self.kind == "held-out":
            found.append(f"not ({TRAIN})")
        elif self.kind:
            found.append(OF_KIND)
            values |= of_kind(self.kind)
        if self.outcome == "failed":
            found.append(f"{VALID} and {FAILED}")
        elif self.outcome:
            found.append(f"({OUTCOME}) = :outcome")
        if self.ending:
            found += [f"({ENDING}) = :ending", FAILED]
        for name, sign in (("low", ">="), ("high", "<=")):
            if getattr(self, name) is not None:
                found.append(f"reward {sign} :{name} {'-' if name == 'low' else '+'} 1e-9 and {VALID}")
        for name, column in (("environment", "environment"), ("task", "task"), ("group", "grp")):
            if getattr(self, name):
                found.append(f"{column} = :{name}")
        if self.difficulty:
            found.append("difficulty = cast(:difficulty as integer)")
        for name, column, quoted in (("tag", "tags", self.tag), ("tool", "tools", self.tool)):
            if quoted:
                found.append(f"instr({column}, :{name}_text)")
                values[f"{name}_text"] = json.dumps(quoted)
        if self.id:
            found.append("substr(id, 1, length(:id)) = :id")
        if (span := span_of(self.versions)) is not None:
            values |= {"first": span[0], "last": span[1]}
            found.append("newest between :first and :last")
        if (span := span_of(self.step)) is not None:
            values |= {"first_step": span[0], "last_step": span[1]}
            found.append(
                f"({TRAIN}) and ((:groups is null and newest between :first_step - 1 and :last_step - 1) "
                "or grp in (select value from json_each(:groups)))"
            )
        for name, sign in (("since", ">="), ("until", "<=")):
            if (moment := moment_of(getattr(self, name))) is not None:
                values[f"{name}_s"] = moment
                found.append(f"started > 0 and started {sign} :{name}_s")
        if self.q:
            found.append("key in (select value from json_each(:found))")
        values |= {item.name: getattr(self, item.name) for item in fields(self)}
        values |= {"groups": None, "found": "[]"}
        return " and ".join(f"({part})" for part in found), values


def span_of(text: str) -> tuple[int, int] | None:
    """First and last of `3-9`, or of one number; None: it is neither."""
    found = SPAN.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2] or found[1]))


def moment_of(text: str) -> float | None:
    """Seconds since 1970 of a date, with or without a time, UTC; None: it is none."""
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


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
        self._searches: OrderedDict[Filter, Search] = OrderedDict()
        self._searching = threading.RLock()
        self._dropped = 0
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
        """Any question; `:best` and `:tools` are known in it."""
        return self.index.connection().execute(sql, {**self.constants, **(values or {})}).fetchall()

    @property
    def constants(self) -> dict[str, Any]:
        """What rewards are measured by: the highest there is, and whether the agents have tools."""
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
        return {"best": seen if best == 1.0 and seen > 1.0 else best, "tools": row["tools"]}

    def _where(self, chosen: Filter) -> tuple[str, dict[str, Any]]:
        """A filter's condition, with what only the run knows."""
        where, values = chosen.where()
        span = span_of(chosen.step)
        if span is not None and (groups := self._groups_of(*span)) is not None:
            values["groups"] = json.dumps(groups)
        if chosen.q:
            values["found"] = self.search(chosen).as_json
        return where, values

    def count(self, kind: str = "") -> int:
        """How many episodes of a kind there are.

        Args:
            kind: as in a filter.
        """
        where, values = self._where(Filter(kind=kind))
        sql = f"select count(*) from t where {where}"
        found: int = self.kept(("count", kind), lambda: self.rows(sql, values)[0][0])
        return found

    def listed(self, chosen: Filter) -> Listed:
        """A page of the rows that a filter takes."""
        share = self._look(chosen) if chosen.q else None
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

    # --- search

    def search(self, chosen: Filter) -> Search:
        """What is known of where a filter's text stands, in all outcomes and rewards, so that each can be counted."""
        base = replace(chosen, outcome="", low=None, high=None, after="", sort="newest")
        with self._searching:
            if self._dropped != self.index.dropped:
                self._searches.clear()
                self._dropped = self.index.dropped
            found = self._searches.setdefault(base, Search())
            self._searches.move_to_end(base)
            while len(self._searches) > MOST_SEARCHES:
                self._searches.popitem(last=False)
            return found

    def _look(self, chosen: Filter) -> float | None:
        """Look on for a filter's text for a while; the share that was looked at, or None: all was."""
        with self._searching:
            found, enough = self.search(chosen), _enough()
            base = replace(chosen, q="", outcome="", low=None, high=None)
            where, values = self._where(base)
            holds = _holder(chosen.q)
            before = len(found.keys)
            found.done = True
            with ExitStack() as stack:
                files = [row["number"] for row in self.rows("select number from file order by number desc")]
                for number in files:
                    if found.done and not self._look_in(number, found, holds, (where, values), enough, stack):
                        found.done = False
            if len(found.keys) > before:
                found.as_json = json.dumps(found.keys)
            if found.done:
                return None
            total = self.rows(f"select count(*) from t where {where}", values)[0][0]
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
                batch = self.rows(f"{sql} limit {SEARCHED}", {**values, "from": first, "to": last})
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
            file = stack.enter_context(self.index.place(key)[0].open("rb"))
            return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError, LookupError):
            return None  # it is gone

    def facets(self, chosen: Filter) -> Facets:
        """The counts of every choice; those of outcome and reward are what choosing another one would give."""
        base = replace(chosen, after="", sort="newest")
        found: Facets = self.kept(
            ("facets", base, len(self.search(base).keys) if base.q else 0), lambda: self._facets(base)
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
            if counts and looked < NEWEST and _takes(kind, file["kind"]):
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


def is_training(kind: str) -> bool:
    """Whether a file's episodes are of training, as `TRAIN` says it."""
    return kind == "train" or (kind.startswith("train-") and not HELD_OUT.match(kind))


def _takes(kind: str, file: str) -> bool:
    """Whether a filter's kind takes the episodes of a file."""
    if kind in ("train", "held-out"):
        return is_training(file) == (kind == "train")
    return not kind or file == kind or re.match(rf"{re.escape(kind)}-\d.*-", file) is not None


def of_kind(kind: str) -> dict[str, str]:
    """The values of `OF_KIND`."""
    letters = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in kind)
    return {"kind": kind, "hosts": f"{letters}-[0-9]*-*"}


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
